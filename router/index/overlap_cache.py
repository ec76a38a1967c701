"""Overlaps of waiting requests: their chains, and the part of each that every worker has.

The chains form a forest, for requests that begin alike share their first blocks: each *run* (blocks that no request leaves
half-way) is matched against the index once for all requests that pass through it.  A run watches its blocks as far as any
worker has them, and the one after: nothing else that is stored or removed can change how far a worker reaches.  A change in a
watched block marks the run and its requests; only those are worked out again, when they are asked for, and only for the workers
that changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.router.errors import UnknownWorker
from headrace.router.index.types import NO_OVERLAP, BlockTable, Overlap

_LOG = 256  # changes of a run that are remembered one by one
_DEEP = 8  # a chain in more runs than this is joined again where that is possible


@dataclass(slots=True, eq=False)
class _Run:
    blocks: list[int]
    children: dict[int, _Run] = field(default_factory=dict)  # by their first block
    requests: dict[str, None] = field(default_factory=dict)  # in the order in which they came
    reach: dict[str, Overlap] = field(default_factory=dict)  # as if the chain began here
    changed: set[str] = field(default_factory=set)  # workers to be matched again
    unknown: bool = True  # all workers to be matched again
    watched: int = 0  # of the blocks, from the first
    odd: bool = False  # a block of it stands elsewhere too, so that it cannot be watched
    log: list[str] = field(default_factory=list)  # workers whose reach changed
    forgotten: int = 0  # entries that were in `log` before

    @property
    def dirty(self) -> bool:
        return self.unknown or bool(self.changed)


@dataclass(slots=True, eq=False)
class _Request:
    chain: list[int]
    path: list[_Run] | None = None  # None: runs were split or joined, find it again
    seen: list[int] = field(default_factory=list)  # per run, how much of its log is in `found`
    found: dict[str, Overlap] = field(default_factory=dict)


class OverlapCache:
    """Keeps the overlaps of tracked requests. Every change of the index must be reported here before the next question."""

    def __init__(self, index: BlockTable) -> None:
        self._index = index
        self._roots: dict[int, _Run] = {}
        self._runs: set[_Run] = set()
        self._requests: dict[str, _Request] = {}
        self._watchers: dict[int, _Run] = {}
        self._dirty: set[_Run] = set()
        self._stale: dict[str, None] = {}  # requests whose overlaps have changed, as far as dirty runs were matched again

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def watched(self) -> int:
        return len(self._watchers)

    # Requests.

    def track(self, request_id: str, chain: Sequence[int]) -> None:
        if request_id in self._requests:
            self.untrack(request_id)
        request = self._requests[request_id] = _Request(list(chain))
        request.path = self._insert(request_id, request.chain)
        self._stale[request_id] = None

    def untrack(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._stale.pop(request_id, None)
        path = request.path or self._path(request)
        siblings = self._roots
        for run in path:
            run.requests.pop(request_id, None)
            if not run.requests:
                siblings.pop(run.blocks[0], None)
                self._discard(run)
            siblings = run.children
        if len(path) > _DEEP:
            for run in reversed(path):
                self._join(run)

    def stale(self) -> Collection[str]:
        """Return the requests whose overlaps may have changed since they were last refreshed. Do not keep it over a refresh."""
        if self._dirty:
            self._refresh_dirty()
        return self._stale.keys()

    def _refresh_dirty(self) -> None:
        """Match dirty runs again.

        Most changes do not change the reach of any worker (a block is stored again, or confirmed), and then nothing has to be
        computed for the requests that pass through.
        """
        for run in self._dirty:
            if not run.dirty or run not in self._runs:
                continue
            before = run.forgotten + len(run.log)
            self._refresh(run)
            if run.forgotten + len(run.log) != before:
                self._stale |= run.requests
        self._dirty.clear()

    def overlaps(self, request_id: str) -> Mapping[str, Overlap]:
        """Return the overlaps of a request as of now. Raises KeyError if it is not tracked.

        The returned mapping changes when it is refreshed later, and no more once the request is not tracked any longer.
        """
        self.refresh(request_id)
        return self._requests[request_id].found

    def refresh(self, request_id: str) -> Collection[str] | None:
        """Bring the overlaps of a request up to date. Raises KeyError if it is not tracked.

        Return the workers whose overlaps may have changed by that; None = any, and `overlaps` returns another mapping.
        """
        request = self._requests[request_id]
        if self._dirty:
            self._refresh_dirty()
        if request_id not in self._stale:
            return ()
        whole = request.path is None or not request.seen
        path = request.path = request.path or self._path(request)
        changed: set[str] = set()
        for at, run in enumerate(path):
            if run.dirty or run.odd:
                self._refresh(run)
            if not whole:
                fresh = request.seen[at] - run.forgotten
                whole = fresh < 0
                changed.update(run.log[max(0, fresh) :])
        if whole:
            found = request.found = dict(path[0].reach) if path else {}
            for worker in path[1].reach if len(path) > 1 else ():  # how far others reach says the first run alone
                if worker in found:
                    found[worker] = _fold(path, worker)
        else:
            found = request.found
            for worker in changed:
                overlap = _fold(path, worker)
                if overlap.blocks:
                    found[worker] = overlap
                else:
                    found.pop(worker, None)
        request.seen = [run.forgotten + len(run.log) for run in path]
        if not any(run.odd for run in path):
            self._stale.pop(request_id, None)
        return None if whole else changed

    # Changes in the index.

    def touched(self, worker: str, blocks: Iterable[int]) -> None:
        watchers = self._watchers
        if watchers.keys().isdisjoint(blocks):
            return
        for block in watchers.keys() & blocks:
            run = watchers[block]
            if worker not in run.changed:
                self._mark(run)
                run.changed.add(worker)

    def touched_all(self, worker: str) -> None:
        for run in self._runs:
            self._mark(run)
            run.changed.add(worker)

    def evicted(self, blocks: Iterable[int]) -> None:
        watchers = self._watchers
        for block in watchers.keys() & blocks:
            run = watchers[block]
            self._mark(run)
            run.unknown = True

    def _mark(self, run: _Run) -> None:
        if not run.dirty:
            self._dirty.add(run)
            if run.odd:  # cannot be watched, so everything may concern it
                self._stale |= run.requests

    # Runs.

    def _refresh(self, run: _Run) -> None:
        reach = run.reach
        if run.unknown or run.odd:
            now = self._index.match_exact(run.blocks)
            run.log.extend(worker for worker in now.keys() | reach.keys() if now.get(worker) != reach.get(worker))
            run.reach = reach = dict(now)
            deepest = max([overlap.blocks for overlap in reach.values()], default=0)
        else:
            deepest = 0  # what was reached before is watched
            for worker in run.changed:
                try:
                    overlap = self._index.match_worker(worker, run.blocks)
                except UnknownWorker:
                    overlap = NO_OVERLAP
                if overlap == reach.get(worker, NO_OVERLAP):
                    continue
                run.log.append(worker)
                if overlap.blocks:
                    reach[worker] = overlap
                    deepest = max(deepest, overlap.blocks)
                else:
                    del reach[worker]
        run.unknown = False
        run.changed.clear()
        if len(run.log) > _LOG:
            run.forgotten += len(run.log)
            run.log.clear()
        self._watch(run, deepest + 1)

    def _watch(self, run: _Run, upto: int) -> None:
        if upto <= run.watched or run.watched == len(run.blocks):
            return
        watchers = self._watchers
        for block in run.blocks[run.watched : upto]:
            if watchers.setdefault(block, run) is not run:
                run.odd = True
        run.watched = min(upto, len(run.blocks))

    def _insert(self, request_id: str, chain: list[int]) -> list[_Run]:
        path, at, siblings = [], 0, self._roots
        while at < len(chain):
            run = siblings.get(chain[at])
            if run is None:
                run = siblings[chain[at]] = _Run(chain[at:])
                self._runs.add(run)
            shared = _shared(run.blocks, chain, at)
            if shared < len(run.blocks):
                self._split(run, shared)
            run.requests[request_id] = None
            path.append(run)
            at += shared
            siblings = run.children
        return path

    def _path(self, request: _Request) -> list[_Run]:
        path, at, siblings = [], 0, self._roots
        while at < len(request.chain):
            run = siblings[request.chain[at]]
            path.append(run)
            at += len(run.blocks)
            siblings = run.children
        return path

    def _split(self, run: _Run, at: int) -> None:
        self._moved(run)
        tail = _Run(run.blocks[at:], children=run.children, requests=dict(run.requests), odd=run.odd)
        self._runs.add(tail)
        for block in run.blocks[at : run.watched]:
            if self._watchers.get(block) is run:
                self._watchers[block] = tail
        tail.watched = max(0, run.watched - at)
        run.watched = min(at, run.watched)
        run.blocks = run.blocks[:at]
        run.children = {tail.blocks[0]: tail}
        run.unknown = True

    def _join(self, run: _Run) -> None:
        if len(run.children) != 1 or not run.requests:
            return
        (tail,) = run.children.values()
        if len(tail.requests) != len(run.requests):
            return
        self._moved(run)
        whole = run.watched == len(run.blocks)
        for block in tail.blocks[: tail.watched]:
            if self._watchers.get(block) is tail:
                if whole:
                    self._watchers[block] = run
                else:
                    del self._watchers[block]
        if whole:
            run.watched += tail.watched
        run.blocks = run.blocks + tail.blocks
        run.children = tail.children
        run.odd = run.odd or tail.odd
        run.unknown = True
        self._runs.discard(tail)

    def _moved(self, run: _Run) -> None:
        for request_id in run.requests:
            if request_id in self._requests:
                self._requests[request_id].path = None
        self._stale |= run.requests

    def _discard(self, run: _Run) -> None:
        self._runs.discard(run)
        for block in run.blocks[: run.watched]:
            if self._watchers.get(block) is run:
                del self._watchers[block]


def _shared(blocks: list[int], chain: list[int], at: int) -> int:
    """Count the blocks that `chain` shares from `at` on; the first must be the same. Slices compare in C."""
    low, high = 0, min(len(blocks), len(chain) - at)
    if blocks[:high] == chain[at : at + high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if blocks[low:middle] == chain[at + low : at + middle]:
            low = middle
        else:
            high = middle
    return low


def _fold(path: list[_Run], worker: str) -> Overlap:
    device = host = total = before = 0  # `host` and `total` with what the tiers above have
    for run in path:
        overlap = run.reach.get(worker)
        if overlap is None:
            break
        if device == before:
            device += overlap.device
        if host == before:
            host += overlap.device + overlap.host
        total += overlap.blocks
        before += len(run.blocks)
        if total < before:
            break
    return Overlap(device, host - device, total - host)
