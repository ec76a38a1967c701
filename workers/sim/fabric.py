"""The fabric: the connection of the engines of one cluster to each other's KV blocks.

Three primitives, those of RDMA libraries: read another engine's blocks, write them, send a notice.  Reading and writing are
one-sided: an engine that knows a block's number gets its content, and the owner is not asked.  That is why a hand-over has
leases, and why a late reader gets wrong content without an error.  Both are posted, and end some time later.

An engine joins and has an *endpoint* from then on.  `LocalFabric` joins engines of one process: transfers end when they are
looked at, and notices arrive before `notify` returns (a member may notify back from within).  `nixl_fabric.py` joins processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, Protocol

import msgspec

from headrace.workers.engine import DisaggStyle, Handover, Role
from headrace.workers.engine import Sequence as EngineSequence
from headrace.workers.errors import RequestInvalid, UnsupportedByEngine
from headrace.workers.sim.blocks import BlockManager
from headrace.workers.sim.run import KvOffer, Side
from headrace.workers.sim.settings import SimSettings, TimingModel


class Notice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A short message between two engines about the hand-over `key`.

    From decode to prefill: "renew" the lease, "fetched" and "rejected" (both: let go of the blocks), "register" (write the
    blocks from number `first` on into my `blocks`).  From prefill to decode, one for each "register" and with its `ticket`:
    "written", or "refused" (nothing will come, and nothing is being written any more).
    """

    kind: Literal["renew", "fetched", "rejected", "register", "written", "refused"]
    key: str
    sender: str
    number: int = 0  # number of the offer; 0 = any
    ticket: int = 0
    blocks: tuple[int, ...] = ()
    first: int = 0
    reason: str = ""
    card: bytes = b""  # the sender's card, where the receiver may not have met it


class Member(Protocol):
    def read(self, blocks: Sequence[int]) -> list[int] | None:
        """Return the contents of these blocks; None when the engine's memory is freed."""

    def write(self, blocks: Sequence[int], cells: Sequence[int]) -> bool:
        """Overwrite these blocks."""

    def notice(self, notice: Notice) -> None:
        """Take a notice; must not block."""


class Transfer(Protocol):
    @property
    def ended(self) -> bool:
        """True when the transfer is done, or has failed."""

    @property
    def failed(self) -> bool:
        """True when the transfer has ended, and `finish` will say why it failed."""

    @property
    def settled(self) -> bool:
        """True when no bytes move any more: the blocks on this side may be used for something else."""

    def finish(self) -> str:
        """Acknowledge the end. Returns an empty text, or why the transfer failed."""


class Endpoint(Protocol):
    """The end of the fabric in one engine. Failures are answers: the other end may be gone at any time."""

    engine: str  # the engine's name on the fabric
    card: bytes  # the card by which engines of other processes reach it

    def leave(self) -> None:
        """Become unreachable."""

    def meet(self, peers: Mapping[str, bytes]) -> None:
        """Learn the cards of all workers; peers that are not among them are forgotten."""

    def reaches(self, engine: str) -> bool:
        """Return true when a handshake with this engine would succeed now."""

    def stamp(self, blocks: Sequence[int], cells: Sequence[int]) -> None:
        """Write these contents into own blocks, before other engines may fetch them."""

    def overwritten(self, blocks: Sequence[int]) -> None:
        """Note that these own blocks no longer hold their stamped contents."""

    def content(self, blocks: Sequence[int]) -> list[int] | None:
        """Return the contents of these own blocks; None when a checksum is wrong."""

    def read(self, engine: str, remote: Sequence[int], local: Sequence[int]) -> Transfer:
        """Copy these blocks of that engine here."""

    def write(self, engine: str, local: Sequence[int], remote: Sequence[int]) -> Transfer:
        """Copy these own blocks to that engine."""

    def notify(self, engine: str, notice: Notice) -> bool:
        """Send a notice. Returns False when the engine cannot be reached."""

    def poll(self) -> bool:
        """Look for ended transfers and notices, if it is time to. Returns true if there were any; notices go to the member."""

    def poll_at(self, *, busy: bool) -> float | None:
        """Return the time of the next poll; None when none is needed. `busy`: a hand-over is open."""


class Fabric(Protocol):
    """The meeting place of engines."""

    def join(self, engine: str, member: Member) -> Endpoint:
        """Join under this id, or one that begins with it. Raises ValueError when that cannot be."""


class LocalFabric:
    def __init__(self) -> None:
        self.members: dict[str, Member] = {}

    def join(self, engine: str, member: Member) -> LocalEndpoint:
        if engine in self.members:
            raise ValueError(f"an engine with id {engine!r} is on this fabric already")
        self.members[engine] = member
        return LocalEndpoint(self, engine, member)


class LocalTransfer:
    """Copies when it is finished; an engine that left meanwhile is noticed at the end."""

    ended = True
    failed = False
    settled = True

    def __init__(self, copy: Callable[[], bool]) -> None:
        self._copy = copy

    def finish(self) -> str:
        return "" if self._copy() else "it went away during the transfer"


class LocalEndpoint:
    """An endpoint without bytes: the content of a block is the answer of its member's `read`."""

    def __init__(self, fabric: LocalFabric, engine: str, member: Member) -> None:
        self.engine = engine
        self.card = b""
        self._fabric = fabric
        self._member = member

    def leave(self) -> None:
        self._fabric.members.pop(self.engine, None)

    def meet(self, peers: Mapping[str, bytes]) -> None:
        """Do nothing: all engines are in this process."""

    def reaches(self, engine: str) -> bool:
        return engine in self._fabric.members

    def stamp(self, blocks: Sequence[int], cells: Sequence[int]) -> None:
        """Do nothing: no bytes are kept."""

    def overwritten(self, blocks: Sequence[int]) -> None:
        """Do nothing: no bytes are kept."""

    def content(self, blocks: Sequence[int]) -> list[int] | None:
        return self._member.read(blocks)

    def read(self, engine: str, remote: Sequence[int], local: Sequence[int]) -> Transfer:
        def copy() -> bool:
            member = self._fabric.members.get(engine)
            cells = member.read(remote) if member is not None else None
            return cells is not None and self._member.write(local, cells)

        return LocalTransfer(copy)

    def write(self, engine: str, local: Sequence[int], remote: Sequence[int]) -> Transfer:
        def copy() -> bool:
            member = self._fabric.members.get(engine)
            cells = self._member.read(local)
            return cells is not None and member is not None and member.write(remote, cells)

        return LocalTransfer(copy)

    def notify(self, engine: str, notice: Notice) -> bool:
        member = self._fabric.members.get(engine)
        if member is None:
            return False
        member.notice(notice)
        return True

    def poll(self) -> bool:
        return False

    def poll_at(self, *, busy: bool) -> float | None:
        return None


PROCESS_FABRIC = LocalFabric()
"""Joins the simulated engines of this process that ask for `fabric` "local"."""


@dataclass(slots=True)
class PeerLink:
    """A link that carries one transfer after the other."""

    free_at: float = 0.0

    def reserve(self, now: float, duration_s: float) -> float:
        """Queue a transfer now. Returns the time at which it will be done."""
        self.free_at = max(now, self.free_at) + duration_s
        return self.free_at


@dataclass(slots=True, kw_only=True)
class HandoverWire:
    """An engine's part in hand-overs. `clock` is the engine's own; adding `wall_offset_s` makes it Unix time.

    `endpoint` is there once the engine has joined a fabric.
    """

    model: str
    role: Role
    settings: SimSettings
    timing: TimingModel
    manager: BlockManager
    clock: Callable[[], float]
    wall_offset_s: float = 0.0
    link: PeerLink = field(default_factory=PeerLink)
    endpoint: Endpoint = field(init=False)

    @property
    def engine(self) -> str:
        """The engine's name on the fabric."""
        return self.endpoint.engine

    @property
    def terms(self) -> str:
        """The terms that engines must have in common to hand over to each other."""
        settings = self.settings
        style = f"params/{settings.transfer_mode}" if settings.style is DisaggStyle.PARAMS else "rendezvous"
        return f"sim/{style}/{settings.block_size}x{settings.block_bytes}"

    @property
    def lends(self) -> bool:
        """True when a prefill engine can read blocks of a decode engine."""
        return self.settings.style is DisaggStyle.PARAMS and self.settings.transfer_mode == "pull"

    @property
    def layout(self) -> str:
        return f"{self.model} {self.terms}"

    def transfer_s(self, blocks: int, descriptors: int) -> float:
        """Return the time that this many blocks take over the link."""
        moving = self.timing.transfer_s(tokens=blocks * self.settings.block_size, descriptors=descriptors)
        return moving * self.settings.faults.slow_transfer

    def side(self, wanted: Handover, sequence: EngineSequence, chain: Sequence[int]) -> Side:
        """Work out the part that this sequence, with this chain, asks for. Raises RequestInvalid or UnsupportedByEngine."""
        if wanted.kind == "lend" and not (self.lends and self.role is Role.DECODE):
            raise UnsupportedByEngine("only an engine in the role decode, of the mode pull, lends its prefixes")
        if wanted.kind not in ("lend", self.role.value):
            raise UnsupportedByEngine(f"an engine in the role {self.role.value} takes no {wanted.kind} hand-overs")
        if self.settings.style is DisaggStyle.RENDEZVOUS:
            if wanted.room is None:
                raise RequestInvalid("a rendezvous needs a room", param="handover")
            if wanted.kind == "decode" and not wanted.peer:
                raise RequestInvalid("the decode side of a rendezvous needs its peer", param="handover")
            kind: Literal["prefill", "decode"] = "decode" if wanted.kind == "decode" else "prefill"
            return Side(kind, f"room {wanted.room}", room=True, peer=wanted.peer or "")
        if wanted.room is not None:
            raise UnsupportedByEngine("this simulator hands over by parameters, not in rooms (disagg)")
        prefilled = Side("prefill", sequence.id)
        if wanted.kind != "decode" and wanted.params is None:
            return prefilled
        offer = parse_offer(wanted.params)
        self._check(offer, sequence, chain)
        then = prefilled if wanted.kind == "prefill" else None
        return Side("decode", offer.request, offer=offer, peer=offer.engine, then=then)

    def _check(self, offer: KvOffer, sequence: EngineSequence, chain: Sequence[int]) -> None:
        if offer.layout != self.layout:
            raise RequestInvalid(f"the prefill engine has {offer.layout!r}, this one {self.layout!r}", param="handover")
        if offer.mode != self.settings.transfer_mode:
            raise RequestInvalid(f"the prefill engine transfers by {offer.mode}, this one does not", param="handover")
        if offer.mode == "push" and offer.request != sequence.id:
            raise RequestInvalid(
                f"to push, both sides need the same request id: {offer.request!r}, {sequence.id!r}", param="handover"
            )
        count = -(-offer.tokens // self.settings.block_size)
        if not 0 < offer.tokens <= len(sequence.token_ids) or len(offer.blocks) != count:
            raise RequestInvalid(f"{len(offer.blocks)} blocks for {offer.tokens} tokens of this prompt", param="handover")
        if offer.chain != list(chain[: len(offer.chain)]) or len(offer.chain) != offer.tokens // self.settings.block_size:
            raise RequestInvalid("these parameters belong to another prompt", param="handover")


def parse_offer(params: Mapping[str, Any] | None) -> KvOffer:
    """Read the parameters of a hand-over. Raises RequestInvalid for anything else."""
    try:
        return msgspec.convert(params, KvOffer)
    except msgspec.ValidationError as error:
        raise RequestInvalid(f"hand-over parameters: {error}", param="handover") from None


def segments(*blocks: Sequence[int]) -> int:
    """Count the descriptors for these blocks, taken pairwise: stretches in which all numbers go up by one."""
    rows = list(zip(*blocks, strict=True))
    breaks = sum(any(b != a + 1 for a, b in zip(one, two, strict=True)) for one, two in pairwise(rows))
    return breaks + bool(rows)
