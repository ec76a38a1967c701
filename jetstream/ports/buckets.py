"""Declares key-value buckets and watches of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Entry:
    """A key of a bucket with its value. `revision` is the stream sequence that compare-and-set refers to."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a key that a watch reports. `value` is None except for `put`.

    `missing`: the key was gone when the keys were listed again, and nothing says why. A server that was restarted has forgotten
    the keys of a bucket in memory, whose holders write them again.
    """

    key: str
    value: bytes | None
    revision: int
    kind: Literal["put", "delete", "expired", "missing"] = "put"


KeyState = Literal["present", "deleted", "expired", "unknown"]


class Bucket(Protocol):
    """A key-value bucket. A key that was deleted or has expired is absent, also while its marker is still stored."""

    async def get(self, key: str) -> Entry | None:
        """Read a key from the server, never from a watch or cache."""

    async def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> int: ...

    async def create(self, key: str, value: bytes, *, ttl_s: float | None = None, unmarked: bool = False) -> int:
        """Write the key only if it is absent; with `unmarked` only if its state is `unknown`. Raises RevisionConflict."""

    async def state(self, key: str) -> KeyState:
        """Read from the server whether a key is present, or why it is absent.

        `unknown`: the bucket has no record of it. It never had one, its marker is gone, or the bucket was made again.
        """

    async def age_s(self) -> float:
        """Return how long ago the server made the bucket, by its wall clock.

        One in memory is made again after each restart of the server.
        """

    async def update(self, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
        """Write the key only if it still has this revision. Raises RevisionConflict."""

    async def delete(self, key: str, *, revision: int | None = None) -> None: ...

    async def entries(self, pattern: str = ">") -> list[Entry]:
        """Read all present keys that match, from the stream's leader."""

    def watch(self, on_change: Callable[[Change], None], pattern: str = ">") -> Watch: ...


class Watch(Protocol):
    """A view of a bucket that is kept current."""

    async def run(self) -> None:
        """Report every present key, then every change, until cancelled.

        After a reconnect or a gap it lists the keys again and reports those that vanished meanwhile as `missing`. Deletions by
        writers are reported of such keys, and of unknown ones, too, possibly more than once.
        """

    async def ready(self, timeout_s: float) -> None:
        """Return once the first listing is complete. Raises RequestTimeout."""
