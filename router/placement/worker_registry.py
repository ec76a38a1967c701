"""The workers of a pool as one router knows them: their leases, load, speeds and share of recent work. Sans-io.

Leases add and remove workers; load reports and job events say what they have to do, and how fast they are.
"""

from __future__ import annotations

from collections import OrderedDict

from headrace.broker.messages import EventKind, JobEvent, LoadReport
from headrace.router.placement.admission import PoolSpeed
from headrace.router.placement.calibration import Calibration
from headrace.router.placement.costs.cost import RecentWork
from headrace.router.placement.disagg_planner import DisaggPlanner
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.many_workers import ManyWorkers
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.suspects.lost_workers import LostWorkers
from headrace.router.placement.types import WorkerInfo

_MOST_RUNNING = 65_536
_MOST_EARLY = 8192  # seconds of events at full speed, and an announcement is late by milliseconds


class WorkerRegistry:
    """Keeps the workers of one pool. Times are seconds of the scheduler's clock."""

    def __init__(self, settings: SchedulerSettings, loads: LoadTable, disagg: DisaggPlanner, lost: LostWorkers) -> None:
        self._settings = settings.calibration
        self._calibrations: dict[str, Calibration] = {}  # by fleet: workers of one are alike, those of two are not
        self.recent = RecentWork(settings.balance_horizon)
        self._loads = loads
        self.many = ManyWorkers(loads, settings, self.recent)
        self._disagg = disagg
        self._lost = lost
        self._running: OrderedDict[str, tuple[str, float]] = OrderedDict()  # id → worker, started
        # What workers have told of requests that are in no load, by id and attempt: nothing orders their messages and those of
        # other routers, so a request may have ended before its placement is announced.
        self._early: OrderedDict[tuple[str, int], EventKind] = OrderedDict()

    # Leases.

    def put(self, info: WorkerInfo, now_s: float) -> bool:
        """Add a worker, or update one. Return False if its lease says nothing new."""
        known = self._loads.get(info.worker) or self._disagg.pool.get(info.worker)
        if known is not None and known.info == info:
            return False
        if known is None and info.serves:
            self._lost.join()
        if known is not None and known.info.serves != info.serves:
            self._drop(info.worker, now_s)
        speed = self._calibration(info.fleet).estimate(info.worker)
        self._disagg.put_worker(info, speed)
        if info.serves:
            others = [load.info.worker for load in self._loads]
            if self._loads.put(info, speed):
                self.recent.join(info.worker, others)
        return True

    def remove(self, worker: str, now_s: float) -> bool:
        """Remove a worker. Return False if it is unknown."""
        load = self._loads.get(worker)
        if not self._drop(worker, now_s):
            return False
        if load is not None and not load.info.draining:
            self._lost.lose(now_s, load.info.start_s)
        for calibration in self._calibrations.values():
            calibration.remove(worker)
        self._disagg.remove_worker(worker)
        return True

    def _drop(self, worker: str, now_s: float) -> bool:
        self.recent.remove(worker)
        return self._loads.remove(worker) is not None or self._disagg.pool.remove(worker, now_s) is not None

    # Load.

    def on_report(self, report: LoadReport, now_s: float) -> WorkerLoad | None:
        """Learn from a load report. Return the worker's load, or None if it gets no requests."""
        load = self._loads.get(report.worker)
        known = load or self._disagg.pool.get(report.worker)
        if known is None:
            return None
        calibration = self._calibration(known.info.fleet)
        if calibration.observe(report) and calibration.young:
            self._set_speed_of_young(calibration)
        speed = calibration.estimate(report.worker)
        if self._disagg.known:
            self._disagg.on_report(report, speed, now_s)
        if load is not None:
            load.on_report(report, now_s)
            load.full_s = None
            load.speed = speed
            load.described = False
        return load

    def _set_speed_of_young(self, calibration: Calibration) -> None:
        for worker in calibration.young:
            if (load := self._loads.get(worker)) is not None and (speed := calibration.estimate(worker)) != load.speed:
                load.speed = speed
                load.described = False

    def _calibration(self, fleet: str) -> Calibration:
        found = self._calibrations.get(fleet)
        if found is None:
            found = self._calibrations[fleet] = Calibration(self._settings)
        return found

    @property
    def prefill_tokens_per_s(self) -> float:
        """The rate of a worker of the quickest fleet; that of the settings while nothing is known."""
        speeds = [calibration.pool() for calibration in self._calibrations.values()]
        return max((speed.prefill_tokens_per_s for speed in speeds), default=self._settings.prefill_tokens_per_s)

    def placed_elsewhere(self, event: JobEvent, now_s: float) -> WorkerLoad | None:
        """Count a placement of another router. Return the worker's load, or None if it is unknown."""
        load = self._loads.get(event.worker)
        if load is None:
            return None
        self.recent.add(event.worker, event.uncached or event.tokens)
        told = self._early.pop((event.id, event.attempt), None)
        if told not in (None, "started", "prefilled"):  # it has ended
            return load
        if event.prefill:
            load.place(event.id, tokens=0, blocks=0, now_s=now_s)
            if told != "prefilled":
                self._disagg.placed_elsewhere(event, now_s)
        else:
            load.place(event.id, tokens=event.uncached or event.tokens, blocks=event.blocks, now_s=now_s)
        if told is not None:
            load.started(event.id, now_s)
        return load

    def on_event(self, event: JobEvent, now_s: float) -> None:
        """Learn that a request has started, that its prompt is computed, or that it has ended there."""
        if event.kind == "started":
            load = self._loads.get(event.worker)
            if load is not None:
                if not load.started(event.id, now_s):
                    self._note_early(event)
                self._running[event.id] = (event.worker, now_s)
                while len(self._running) > _MOST_RUNNING:
                    self._running.popitem(last=False)
            return
        self._disagg.pool.close(event.id, now_s)
        if event.kind != "prefilled":
            self._ended(event, now_s)
        elif (event.id, event.attempt) in self._early:
            self._note_early(event)

    def _note_early(self, event: JobEvent) -> None:
        self._early[event.id, event.attempt] = event.kind
        while len(self._early) > _MOST_EARLY:
            self._early.popitem(last=False)

    def _ended(self, event: JobEvent, now_s: float) -> None:
        load, started = self._loads.get(event.worker), self._running.pop(event.id, None)
        if load is not None:
            if load.remove_entry(event.id) is None:
                self._note_early(event)
            if event.kind == "settled" and started is not None and started[0] == event.worker:
                load.note_residency(now_s - started[1])

    def pool_speed(self, routers: int, now_s: float) -> PoolSpeed:
        """Return what this router may count on. Its window holds about as much as each other one, and all use these workers."""
        pending, speed = self.many.totals(now_s) if self._loads.many else self._totals(now_s)
        pending += self._disagg.pool.queued_tokens(now_s)
        speed += self._disagg.speed()
        return PoolSpeed(tokens_per_s=speed / routers, pending_tokens=pending / routers)

    def _totals(self, now_s: float) -> tuple[float, float]:
        pending = sum(load.pending_tokens(now_s) for load in self._loads.ordered)
        return pending, sum(load.speed.prefill_tokens_per_s for load in self._loads.ordered)
