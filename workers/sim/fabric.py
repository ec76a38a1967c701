"""The fabric: how the engines of one cluster reach each other's KV blocks.

Three primitives, those of RDMA libraries: read another engine's blocks, write them, send a notice.  Reading and writing are
one-sided: whoever knows a block's number gets what lies there, and the owner is not asked.  That is why a hand-over has leases,
and why a late reader gets wrong content without an error.

`LocalFabric` joins engines of one process.  Notices arrive before `notify` returns, and a member may notify back from within.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """A short message between two engines about the hand-over `key`.

    From decode to prefill: "renew" the lease, "fetched" and "rejected" (both: let go of the blocks), "register" (write the
    blocks from number `first` on into my `blocks`).  From prefill to decode: "written", and "refused" (nothing will come).
    """

    kind: Literal["renew", "fetched", "rejected", "register", "written", "refused"]
    key: str
    sender: str
    blocks: tuple[int, ...] = ()
    first: int = 0
    reason: str = ""


class Member(Protocol):
    """An engine as the others see it."""

    def read(self, blocks: Sequence[int]) -> list[int] | None:
        """What these blocks hold; None when its memory is not there."""

    def write(self, blocks: Sequence[int], cells: Sequence[int]) -> bool:
        """Overwrite these blocks."""

    def notice(self, notice: Notice) -> None:
        """Take a notice; must not block."""


class Fabric(Protocol):
    """What an engine needs to hand blocks over. Failures are answers: the other end may be gone at any time."""

    def join(self, engine: str, member: Member) -> None:
        """Be reachable under this id. Raises ValueError when the id is taken."""

    def leave(self, engine: str) -> None: ...

    def reaches(self, engine: str) -> bool:
        """Whether a handshake with this engine would succeed now."""

    def read(self, engine: str, blocks: Sequence[int]) -> list[int] | None:
        """What lies in these blocks of that engine; None when it cannot be reached."""

    def write(self, engine: str, blocks: Sequence[int], cells: Sequence[int]) -> bool:
        """Overwrite these blocks of that engine; False when it cannot be reached."""

    def notify(self, engine: str, notice: Notice) -> bool:
        """Send a notice; False when the engine cannot be reached."""


class LocalFabric:
    """The fabric of one process and one thread."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}

    def join(self, engine: str, member: Member) -> None:
        if engine in self._members:
            raise ValueError(f"an engine with id {engine!r} is on this fabric already")
        self._members[engine] = member

    def leave(self, engine: str) -> None:
        self._members.pop(engine, None)

    def reaches(self, engine: str) -> bool:
        return engine in self._members

    def read(self, engine: str, blocks: Sequence[int]) -> list[int] | None:
        member = self._members.get(engine)
        return None if member is None else member.read(blocks)

    def write(self, engine: str, blocks: Sequence[int], cells: Sequence[int]) -> bool:
        member = self._members.get(engine)
        return member is not None and member.write(blocks, cells)

    def notify(self, engine: str, notice: Notice) -> bool:
        member = self._members.get(engine)
        if member is None:
            return False
        member.notice(notice)
        return True


PROCESS_FABRIC = LocalFabric()
"""Joins the simulated engines of this process unless they are given another fabric."""
