"""Reports the workers of `benchmarks.disagg.world` to their router: cache events and load, a little late."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.disagg.node import Node
from benchmarks.virtual_clock import VirtualClock
from headrace.broker.messages.events import LoadReport
from headrace.router.index.view import Caches
from headrace.router.placement.scheduler import Scheduler
from headrace.workers.engine import KvEvent

EVENT_S = 0.001
KV_S = 0.002
REPORT_S, HEARTBEAT_S = 0.02, 0.2  # load reports are at least and at most so far apart


class News:
    """`heard` is called when the router knows something new."""

    def __init__(self, clock: VirtualClock, router: Scheduler, view: Caches, heard: Callable[[], None]) -> None:
        self._clock = clock
        self._router = router
        self._view = view
        self._heard = heard

    def cache(self, node: Node, events: Sequence[KvEvent], after_s: float) -> None:
        if events:
            self._clock.at(self._clock.now_s + after_s + KV_S, self._apply, node.name, events)

    def _apply(self, name: str, events: Sequence[KvEvent]) -> None:
        for event in events:
            blocks = {event.tier: list(event.hashes)}
            stored = event.kind == "stored"
            self._view.apply(name, removed={} if stored else blocks, stored=blocks if stored else {}, now_s=self._clock.now_s)
        self._heard()

    def soon(self, node: Node) -> None:
        if not node.report_due:
            node.report_due = True
            self._clock.at(max(self._clock.now_s, node.reported_s + REPORT_S), self._report, node)

    def heartbeat(self, node: Node) -> None:
        if self._clock.now_s - node.reported_s >= HEARTBEAT_S - 1e-9:
            self._report(node)
        self._clock.at(node.reported_s + HEARTBEAT_S, self.heartbeat, node)

    def _report(self, node: Node) -> None:
        node.report_due = False
        node.reports += 1
        node.reported_s = self._clock.now_s
        load = node.engine.load(node.step_ends_s - self._clock.now_s if node.busy else 0.0)
        report = LoadReport(
            worker=node.name,
            epoch=1,
            n=node.reports,
            at=self._clock.now_s,
            slots=node.engine.settings.slots,
            running=node.runs,
            waiting=load.waiting,
            blocks_total=load.blocks_total,
            blocks_used=load.blocks_used,
            queued_prefill_tokens=load.queued_prefill_tokens,
            step_s=load.step_s,
            step_prefill_tokens=load.step_prefill_tokens,
            step_decodes=load.step_decodes,
            handover_s=node.handover[0],
            handover_tokens=node.handover[1],
        )
        self._clock.at(self._clock.now_s + EVENT_S, self._hear_report, report)

    def _hear_report(self, report: LoadReport) -> None:
        self._router.on_report(report, self._clock.now_s)
        self._heard()
