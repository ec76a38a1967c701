"""Merges the cache changes that wait to be published, and packs them into numbered messages. Sans-io.

The waiting changes are the net effect since the last message, one entry per block, so they never exceed the blocks that readers
know plus those cached now. Messages are numbered when they are packed; the number of a message that cannot be stored stays
unused, and readers see the gap.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from headrace.broker.codec import encode, pack_u64
from headrace.broker.messages import KvReset, KvStep
from headrace.workers.engine import TIERS, Tier
from headrace.workers.kv.translator import CacheChange

MAX_BYTES = 256 * 1024
HEADROOM = 512  # bytes for everything in a message except the blocks
_WORD = 8


@dataclass(frozen=True, slots=True)
class Sealed:
    """A message with its number; `blocks` is the number of its entries."""

    n: int
    kind: str  # step or reset
    data: bytes
    blocks: int


class Outbox:
    """The unpublished cache changes of an epoch of a worker."""

    def __init__(self, *, worker: str, epoch: int) -> None:
        self.n = 0  # of the next message
        self._worker = worker
        self._epoch = epoch
        self._dumps = 0
        self._cleared = False
        self._removed: dict[Tier, dict[int, None]] = {tier: {} for tier in TIERS}
        self._stored: dict[Tier, dict[int, None]] = {tier: {} for tier in TIERS}

    def merge(self, change: CacheChange) -> None:
        """Add the changes of a step."""
        if change.cleared:
            self._cleared = True
            for tier in TIERS:
                self._removed[tier].clear()
                self._stored[tier].clear()
        for tier, values in change.removed.items():
            stored, removed = self._stored[tier], self._removed[tier]
            for value in values:
                if value in stored:
                    del stored[value]
                else:
                    removed[value] = None
        for tier, values in change.stored.items():
            stored, removed = self._stored[tier], self._removed[tier]
            for value in values:
                if value in removed:
                    del removed[value]
                else:
                    stored[value] = None

    @property
    def size(self) -> int:
        """Return the number of waiting entries."""
        return sum(map(len, self._removed.values())) + sum(map(len, self._stored.values()))

    def __bool__(self) -> bool:
        return self._cleared or any(self._stored.values()) or any(self._removed.values())

    def seal(self, inventory: Mapping[Tier, Collection[int]], *, max_bytes: int = MAX_BYTES) -> list[Sealed]:
        """Pack all waiting changes into numbered steps of at most `max_bytes`: at least one step, even if it is empty.

        `inventory` holds the blocks cached now. If it is shorter than the list of changes, it is sent instead.
        """
        if not self._cleared and self.size > sum(map(len, inventory.values())):
            self.merge(CacheChange(cleared=True, stored={tier: list(values) for tier, values in inventory.items()}))
        entries = [("removed", tier, value) for tier in TIERS for value in self._removed[tier]]
        entries += [("stored", tier, value) for tier in TIERS for value in self._stored[tier]]
        cleared = self._cleared
        self._drop()
        sealed = []
        for part in _parts(entries, max_bytes) or [[]]:
            removed: dict[str, bytes] = {}
            stored: dict[str, bytes] = {}
            for (what, tier), values in _grouped(part):
                (stored if what == "stored" else removed)[tier] = pack_u64(values)
            step = KvStep(
                worker=self._worker, epoch=self._epoch, n=self._number(), cleared=cleared, removed=removed, stored=stored
            )
            sealed.append(Sealed(step.n, "step", encode(step), len(part)))
            cleared = False
        return sealed

    def dump(self, inventory: Mapping[Tier, Collection[int]], *, max_bytes: int = MAX_BYTES) -> list[Sealed]:
        """Pack the whole inventory into numbered parts of a reset. It includes the waiting changes."""
        self._drop()
        self._dumps += 1
        entries = [("", tier, value) for tier in TIERS for value in inventory.get(tier, ())]
        parts = _parts(entries, max_bytes) or [[]]
        sealed = []
        for number, part in enumerate(parts):
            reset = KvReset(
                worker=self._worker,
                epoch=self._epoch,
                n=self._number(),
                dump=self._dumps,
                part=number,
                last=number == len(parts) - 1,
                blocks={tier: pack_u64(values) for (_, tier), values in _grouped(part)},
            )
            sealed.append(Sealed(reset.n, "reset", encode(reset), len(part)))
        return sealed

    def _number(self) -> int:
        n = self.n
        self.n += 1
        return n

    def _drop(self) -> None:
        self._cleared = False
        for tier in TIERS:
            self._removed[tier] = {}
            self._stored[tier] = {}


_Entry = tuple[str, Tier, int]


def _parts(entries: list[_Entry], max_bytes: int) -> list[list[_Entry]]:
    most = max(1, (max_bytes - HEADROOM) // _WORD)
    return [entries[start : start + most] for start in range(0, len(entries), most)]


def _grouped(entries: list[_Entry]) -> Iterator[tuple[tuple[str, Tier], list[int]]]:
    groups: dict[tuple[str, Tier], list[int]] = {}
    for what, tier, value in entries:
        groups.setdefault((what, tier), []).append(value)
    yield from groups.items()
