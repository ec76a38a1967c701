"""Changes of one worker's blocks, applied to the view in slices, so that nothing else waits for long."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from headrace.broker.codec import unpack_u64_array
from headrace.broker.errors import MalformedMessage
from headrace.router.errors import UnknownWorker
from headrace.router.index.types import TIERS, CacheView, Tier
from headrace.router.kv_events import metrics
from headrace.router.kv_events.inventory import MAX_STEP_BLOCKS
from headrace.router.kv_events.sliced_work import Work

SLICE_BLOCKS = 4096  # a few milliseconds

Blocks = Mapping[Tier, "array[int]"]  # arrays take no parameter at run time before Python 3.12


class UnusableBlocks(Exception):
    """A block list cannot be read. `reason` is a metric label."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Applier:
    """Applies changes to the view. `on_vanished` is called with a worker that another part has dropped from it."""

    def __init__(self, view: CacheView, on_vanished: Callable[[str], None]) -> None:
        self.busy = ""  # the worker whose change is half done
        self._view = view
        self._on_vanished = on_vanished

    def change(self, worker: str, *, cleared: bool, removed: Blocks, stored: Blocks, now_s: float) -> Work | None:
        """Apply one engine step: at once, or by the returned work if it is large."""
        if sum(map(len, chain(removed.values(), stored.values()))) > SLICE_BLOCKS:
            return self.in_slices(worker, cleared=cleared, removed=removed, stored=stored, now_s=now_s)
        try:
            self._view.apply(worker, cleared=cleared, removed=removed, stored=stored, now_s=now_s)
        except UnknownWorker:
            self._on_vanished(worker)
        return None

    def replace(self, worker: str, blocks: Blocks, *, now_s: float) -> Work | None:
        """Replace all blocks of a worker: at once, or by the returned work if they are many."""
        if sum(map(len, blocks.values())) > SLICE_BLOCKS:
            return self.in_slices(worker, cleared=True, removed={}, stored=blocks, now_s=now_s)
        try:
            self._view.replace(worker, blocks, now_s=now_s)
        except UnknownWorker:
            self._on_vanished(worker)
        return None

    def in_slices(self, worker: str, *, cleared: bool, removed: Blocks, stored: Blocks, now_s: float) -> Work:
        """Apply a change slice by slice. In between, the worker seems to hold less than it does, never more."""
        self.busy = worker
        try:
            if cleared:
                self._view.apply(worker, cleared=True, removed={}, stored={}, now_s=now_s)
                yield
            for some in _slices(removed):
                self._view.apply(worker, removed=some, stored={}, now_s=now_s)
                yield
            for some in _slices(stored):
                self._view.apply(worker, removed={}, stored=some, now_s=now_s)
                yield
        except UnknownWorker:
            self._on_vanished(worker)
        finally:
            self.busy = ""


def unpack(packed: Mapping[str, bytes]) -> dict[Tier, array[int]]:
    """Unpack the block lists of a message. Raises UnusableBlocks.

    Unknown tiers are counted and left out: a newer worker has them, and the router makes no use of blocks there.
    """
    blocks: dict[Tier, array[int]] = {}
    for name, data in packed.items():
        if len(data) > 8 * MAX_STEP_BLOCKS:
            raise UnusableBlocks("too_large", f"{len(data) // 8} blocks in one message, at most {MAX_STEP_BLOCKS} are read")
        if name not in TIERS:
            metrics.REFUSED.labels("unknown_tier").inc()
            continue
        try:
            blocks[name] = unpack_u64_array(data)
        except MalformedMessage as error:
            raise UnusableBlocks("misaligned", f"tier {name}: {error}") from None
    return blocks


def _slices(blocks: Blocks) -> Iterator[Blocks]:
    for tier, values in blocks.items():
        for start in range(0, len(values), SLICE_BLOCKS):
            yield {tier: values[start : start + SLICE_BLOCKS]}
