"""Load of the workers, as one router knows it.

The reports of a worker are the truth; placements that are not in a report yet are counted on top, and nothing else is
remembered.  So the load of a lost request vanishes within seconds by construction: it is either in the worker's own report, or
its entry expires.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Generic, Protocol, TypeVar

from headrace.broker.messages.events import LoadReport
from headrace.broker.places import worker_of
from headrace.router.placement.calibration import SpeedEstimate
from headrace.router.placement.types import WorkerInfo


class ColumnLoad(Protocol):
    info: WorkerInfo
    column: int


L = TypeVar("L", bound=ColumnLoad)


class WorkerColumns(Generic[L]):
    def __init__(self, make: Callable[[WorkerInfo, int, SpeedEstimate], L]) -> None:
        self._make = make
        self._by_name: dict[str, L] = {}
        self.get: Callable[[str], L | None] = self._by_name.get  # the worker of a name
        self.ordered: list[L] = []

    def __len__(self) -> int:
        return len(self.ordered)

    def __iter__(self) -> Iterator[L]:
        return iter(self.ordered)

    def put(self, info: WorkerInfo, speed: SpeedEstimate) -> bool:
        known = self._by_name.get(info.worker)
        if known is not None:
            known.info = info
            return False
        load = self._make(info, len(self.ordered), speed)
        self._by_name[info.worker] = load
        self.ordered.append(load)
        return True

    def _remove(self, worker: str) -> L | None:
        load = self._by_name.pop(worker, None)
        if load is not None:
            self.ordered.remove(load)
            for column, other in enumerate(self.ordered):
                other.column = column
        return load


MANY = 48  # workers, about


@dataclass(slots=True)
class LoadEntry:
    """A request on its way to a worker, or just taken by it."""

    tokens: int  # uncached
    blocks: int
    placed_s: float
    started_s: float | None = None
    yields: bool = False  # a batch request that would make way for an interactive one
    limit: int = 0  # of a suspect: the most that may run together with it


@dataclass(slots=True)
class WorkerLoad:
    """Load of a worker. Times are seconds of the scheduler's clock."""

    info: WorkerInfo
    column: int
    speed: SpeedEstimate
    entries: dict[str, LoadEntry] = field(default_factory=dict)
    report: LoadReport | None = None
    reported_s: float = 0.0
    residency_s: float = 0.0  # mean time from start to end of a request
    _entry_tokens: int = 0
    _entry_blocks: int = 0
    _yielding: int = 0
    _yielding_blocks: int = 0
    _limited: int = 0  # entries with a limit
    full_s: float | None = None  # since when it has refused a placement
    opened_s: float | None = None  # since when it has had room
    kept_on_trial: bool = False  # more suspects wait for it
    described: bool = False  # by `ManyWorkers`, as it is now; a change of a field from outside unsets it
    alone: bool = False  # no other worker serves the pool: others run beside its suspects, but for one that is to run alone

    # What is on its way.

    def place(self, request_id: str, *, tokens: int, blocks: int, now_s: float, limit: int = 0, yields: bool = False) -> None:
        self.remove_entry(request_id)
        self.entries[request_id] = LoadEntry(tokens, blocks, now_s, limit=limit, yields=yields)
        self._entry_tokens += tokens
        self._entry_blocks += blocks
        self._limited += limit > 0
        self.described = False
        if yields:
            self._yielding += 1
            self._yielding_blocks += blocks

    def started(self, request_id: str, now_s: float) -> bool:
        """Note that a request has started. Return False if nothing was known of it."""
        entry = self.entries.get(request_id)
        if entry is not None and entry.started_s is None:
            entry.started_s = now_s
        return entry is not None

    def remove_entry(self, request_id: str) -> LoadEntry | None:
        entry = self.entries.pop(request_id, None)
        if entry is not None:
            self._entry_tokens -= entry.tokens
            self._entry_blocks -= entry.blocks
            self._limited -= entry.limit > 0
            self.described = False
            if entry.yields:
                self._yielding -= 1
                self._yielding_blocks -= entry.blocks
        return entry

    def on_report(self, report: LoadReport, now_s: float) -> None:
        """Take a load report over, and drop the entries of started requests: the report counts them."""
        self.report = report
        self.reported_s = now_s
        self.described = False
        for request_id in [i for i, entry in self.entries.items() if entry.started_s is not None]:
            self.remove_entry(request_id)

    def expire(self, before_s: float) -> list[str]:
        """Drop entries that are older than this and were never confirmed, and return their ids."""
        late = [i for i, entry in self.entries.items() if entry.placed_s < before_s]
        for request_id in late:
            self.remove_entry(request_id)
        return late

    # Figures.

    @property
    def running(self) -> int:
        return len(self.entries) + (self.report.running if self.report is not None else 0)

    def pending_tokens(self, now_s: float) -> float:
        """Predict the prompt tokens to be computed before anything placed now.

        These are the reported ones less those computed since, and those on their way.
        """
        queued = 0.0
        if self.report is not None and self.report.queued_prefill_tokens:
            done = (now_s - self.reported_s) * self.speed.prefill_tokens_per_s
            queued = max(0.0, self.report.queued_prefill_tokens - done)
        return queued + self._entry_tokens

    @property
    def placed_tokens(self) -> int:
        return self._entry_tokens

    @property
    def queued_tokens(self) -> float:
        """Prompt tokens that may be in the same steps as those of anything placed now.

        None is assumed to be computed since the report, because the step that runs may have begun before them.
        """
        return self._entry_tokens + (self.report.queued_prefill_tokens if self.report is not None else 0)

    @property
    def yielding(self) -> int:
        """Batch requests among them that would make way for an interactive one."""
        return self._yielding + (self.report.yielding if self.report is not None else 0)

    def blocks_free(self, *, batch: bool = False) -> float:
        """Return the KV blocks, of the pool's size, that a request could get; infinite if the worker does not report them."""
        report, each = self.report, self.info.pool_blocks
        if report is None or not report.blocks_total:
            return float("inf")
        free = (report.blocks_total - report.blocks_used) * each - self._entry_blocks
        return free if batch else free + report.yielding_blocks * each + self._yielding_blocks

    def slots_left(self, spare: int, *, batch: bool = False) -> int:
        """Count the slots that a request could get, including those that an interactive request would free."""
        if not self.info.slots:
            return 1_000_000
        return self.info.slots + spare - self.running + (0 if batch else self.yielding)

    @property
    def on_trial(self) -> bool:
        """Suspects are there, or about to be: any other request placed beside them would have to wait for them."""
        told = self.report is not None and self.info.slots > 0 and not self.report.slots
        if told or self.kept_on_trial or not self._limited:
            return told or self.kept_on_trial
        company = 1 if self.alone else inf  # up to this limit of a suspect on its way nothing else is placed
        return any(0 < entry.limit <= company for entry in self.entries.values())

    @property
    def has_suspects(self) -> bool:
        """Suspects are there, or about to be, whether or not others may be placed beside them."""
        return self.on_trial or self.suspects > 0

    @property
    def suspects(self) -> int:
        return self.reported_suspects + self.suspects_on_way

    @property
    def reported_suspects(self) -> int:
        return self.report.suspects if self.report is not None else 0

    @property
    def suspects_on_way(self) -> int:
        return self._limited

    @property
    def group_limit(self) -> float:
        """The most suspects that may run together there; infinite while there are none."""
        limits = [entry.limit for entry in self.entries.values() if entry.limit]
        if self.report is not None and self.report.suspects:
            limits.append(self.report.limit)
        return min(limits, default=inf)

    def takes_one_more(self, spare: int, ahead_s: float) -> bool:
        info, report = self.info, self.report
        if info.draining or self.full_s is not None:
            return False
        if ((report is not None and not report.slots) or self.kept_on_trial or self._limited) and self.on_trial:
            return False
        if not info.slots:
            return True
        left = info.slots + spare - len(self.entries) + self._yielding  # as `slots_left` counts: this is asked all the time
        if report is not None:
            left += report.yielding - report.running
        return left > 0 or left + self.ending_within(ahead_s) > 0

    def takes_batch(self, reserve: float) -> bool:
        if self.info.draining or self.full_s is not None or self.on_trial:
            return False
        return self.slots_left(0, batch=True) > int(self.info.slots * reserve)

    def ending_within(self, seconds: float) -> int:
        """Estimate the slots that become free in this time: a request that is placed now finds one when it arrives."""
        if not self.residency_s:
            return 0
        return min(int(self.info.slots * seconds / self.residency_s), self.info.slots)

    def note_residency(self, took_s: float) -> None:
        self.described = False
        self.residency_s = took_s if not self.residency_s else 0.9 * self.residency_s + 0.1 * took_s

    def slot_wait_s(self, *, batch: bool = False) -> float:
        """Predict the wait for a free slot, while all are taken: they end one after the other.

        Infinite on trial: nothing tells how long that takes, and no request is to be held back for it.
        """
        if self.on_trial:
            return inf
        if self.slots_left(0, batch=batch) > 0:
            return 0.0
        return self.residency_s / max(1, self.info.slots)


class LoadTable(WorkerColumns[WorkerLoad]):
    """Holds all workers of a pool that get requests."""

    def __init__(self) -> None:
        super().__init__(WorkerLoad)
        self.version = 0  # of the columns
        self.many = False  # so many that describing them as arrays (`ManyWorkers`) is the quicker way
        self.names: tuple[str, ...] = ()
        self.serving: list[int] = []  # columns of the workers that do not drain
        self._oldest_s = -inf  # no entry is older, as far as is known
        self.fleets: tuple[str, ...] = ()  # of the workers, sorted
        self.least_context = 0  # tokens that every worker takes, prompt and answer together; 0 = no worker says

    def put(self, info: WorkerInfo, speed: SpeedEstimate) -> bool:
        changed = super().put(info, speed)
        self._note_workers()
        return changed

    def remove(self, worker: str) -> WorkerLoad | None:
        removed = self._remove(worker)
        self._note_workers()
        return removed

    def expire(self, now_s: float, *, after_s: float) -> None:
        if now_s - after_s <= self._oldest_s:
            return
        for load in self.ordered:
            if load.entries:
                load.expire(now_s - after_s)
        left = (entry.placed_s for load in self.ordered for entry in load.entries.values())
        self._oldest_s = min(left, default=now_s)

    @property
    def only_worker(self) -> bool:
        """True where one worker, with all its ranks, is all that stays."""
        return len({worker_of(load.info.worker) for load in self if not load.info.draining}) == 1

    def _note_workers(self) -> None:
        self.version += 1
        self.names = tuple(load.info.worker for load in self)
        self.serving = [load.column for load in self if not load.info.draining]
        self.many = len(self) >= MANY
        self.fleets = tuple(sorted({load.info.fleet for load in self}))
        self.least_context = min((load.info.context for load in self if load.info.context), default=0)
        alone = self.only_worker
        for load in self:
            load.alone, load.described = alone, False
