"""What reaches a router besides requests: load reports, job events, cancels, and questions of operators."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from headrace.broker import metrics as broker_metrics
from headrace.broker.codec import decode, encode
from headrace.broker.errors import WireError
from headrace.broker.messages import Cancel, Explain, Explanation, Inspection, JobEvents, LoadReport, RouterControl
from headrace.broker.protocol.runs import Tombstones
from headrace.jetstream.ports import Message, Messaging
from headrace.jetstream.subjects import Subjects
from headrace.router.session import metrics
from headrace.router.session.ports import Scheduling
from headrace.router.session.prediction_accuracy import PredictionAccuracy
from headrace.router.session.roster import Roster
from headrace.router.session.window import HeldRequest

log = structlog.get_logger()


class RouterInbox:
    """Feeds the scheduler and answers."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        scheduler: Scheduling,
        roster: Roster,
        tombstones: Tombstones,
        hindsight: PredictionAccuracy,
        *,
        pool: str,
        router: str,
        on_news: Callable[[], None],
        on_cancelled: Callable[[HeldRequest], None],
        inspect: Callable[[], Inspection],
        wall: Callable[[], float],
    ) -> None:
        """`on_news`: what the scheduler knows has changed. `on_cancelled`: this one was waiting."""
        self._messaging = messaging
        self._subjects = subjects
        self._scheduler = scheduler
        self._roster = roster
        self._tombstones = tombstones
        self._hindsight = hindsight
        self._pool = pool
        self._router = router
        self._on_news = on_news
        self._on_cancelled = on_cancelled
        self._inspect = inspect
        self._wall = wall
        self._loop = asyncio.get_running_loop()

    async def subscribe(self) -> None:
        await self._messaging.subscribe(self._subjects.load_filter(self._pool), self.on_report)
        await self._messaging.subscribe(self._subjects.events(self._pool), self.on_events)
        await self._messaging.subscribe(self._subjects.cancel(self._pool), self.on_cancel)
        await self._messaging.subscribe(self._subjects.control(self._router), self.on_control)

    def on_report(self, message: Message) -> None:
        try:
            report = decode(LoadReport, message.data)
        except WireError as error:
            self._malformed("load", error)
            return
        metrics.REPORTS.inc()
        self._scheduler.on_report(report, self._loop.time())
        self._on_news()

    def on_events(self, message: Message) -> None:
        try:
            events = decode(JobEvents, message.data).events
        except WireError as error:
            self._malformed("event", error)
            return
        now = self._loop.time()
        for event in events:
            metrics.JOB_EVENTS_OF[event.kind].inc()
            self._scheduler.on_event(event, now)
            self._hindsight.on_event(event, now)
            self._roster.on_event(event, now)
        self._on_news()

    def on_cancel(self, message: Message) -> None:
        try:
            ids = decode(Cancel, message.data).ids
        except WireError as error:
            self._malformed("cancel", error)
            return
        now = self._loop.time()
        for request_id in ids:
            self._tombstones.add(request_id, now)
        for request in self._scheduler.cancel(ids):
            if isinstance(request.key, HeldRequest):
                self._on_cancelled(request.key)

    def on_control(self, message: Message) -> None:
        try:
            control: RouterControl = decode(RouterControl, message.data)  # type: ignore[arg-type]  # a union as a value
        except WireError as error:
            self._malformed("control", error)
            return
        if not message.reply:
            return
        answer = self.explain(control.id) if isinstance(control, Explain) else self._inspect()
        self._messaging.send(message.reply, encode(answer))

    def explain(self, request_id: str) -> Explanation:
        now = self._loop.time()
        explanation = self._scheduler.explain(request_id, now)
        if explanation is None:
            return Explanation(id=request_id, known=False, router=self._router)
        at = self._wall() - (now - explanation.at)
        return msgspec.structs.replace(explanation, router=self._router, at=at)

    def _malformed(self, kind: str, error: WireError) -> None:
        broker_metrics.MALFORMED.labels(kind).inc()
        log.error("message.malformed", kind=kind, pool=self._pool, error=str(error))
