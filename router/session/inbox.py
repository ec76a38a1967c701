"""The messages that reach a router besides requests: load reports, job events, cancels, and questions of operators."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
import structlog

from headrace.broker import metrics as broker_metrics
from headrace.broker.codec import decode, encode
from headrace.broker.errors import WireError
from headrace.broker.messages.control import Decided, Explain, Explanation, RouterControl
from headrace.broker.messages.events import Cancel, JobEvents, LoadReport
from headrace.broker.places import place_name, reports_of
from headrace.jetstream.ports import Message, Subscription
from headrace.router.session import metrics
from headrace.router.session.metrics import PredictionAccuracy
from headrace.router.session.roster import Roster
from headrace.router.session.state import HeldRequest, RequestRelease, RouterDeps, RouterState

log = structlog.get_logger()

D = TypeVar("D", bound=Decided)


class RouterInbox:
    def __init__(
        self,
        deps: RouterDeps,
        state: RouterState,
        roster: Roster,
        accuracy: PredictionAccuracy,
        release: RequestRelease,
    ) -> None:
        self._messaging = deps.messaging
        self._subjects = deps.subjects
        self._pool = deps.pool
        self._router = deps.router
        self._wall = deps.wall
        self._state = state
        self._scheduler = state.scheduler
        self._roster = roster
        self._accuracy = accuracy
        self._release = release
        self._loop = asyncio.get_running_loop()
        self._subscriptions: list[Subscription] = []

    async def subscribe(self) -> None:
        for subject, on_message in (
            (self._subjects.load_filter(self._pool), self.on_report),
            (self._subjects.events(self._pool), self.on_events),
            (self._subjects.cancel(self._pool), self.on_cancel),
            (self._subjects.control(self._router), self.on_control),
        ):
            self._subscriptions.append(await self._messaging.subscribe(subject, on_message))

    async def unsubscribe(self) -> None:
        while self._subscriptions:
            await self._subscriptions.pop().unsubscribe()

    def on_report(self, message: Message) -> None:
        try:
            report = decode(LoadReport, message.data)
        except WireError as error:
            self._malformed("load", error)
            return
        metrics.REPORTS.inc()
        for part in reports_of(report):
            self._scheduler.on_report(part, self._loop.time())
        self._state.changed.set()

    def on_events(self, message: Message) -> None:
        try:
            events = decode(JobEvents, message.data).events
        except WireError as error:
            self._malformed("event", error)
            return
        now = self._loop.time()
        for told in events:
            event = told
            metrics.JOB_EVENTS_OF[event.kind].inc()
            if event.rank is not None:
                event = msgspec.structs.replace(event, worker=place_name(event.worker, event.rank))
            self._scheduler.on_event(event, now)
            self._accuracy.on_event(event, now)
            self._roster.on_event(event, now)
        self._state.changed.set()

    def on_cancel(self, message: Message) -> None:
        """Settle the cancelled requests that wait, and remember all cancelled ids for those that have not arrived yet."""
        try:
            ids = decode(Cancel, message.data).ids
        except WireError as error:
            self._malformed("cancel", error)
            return
        now = self._loop.time()
        for request_id in ids:
            self._state.tombstones.add(request_id, now)
        for request in self._scheduler.cancel(ids):
            if isinstance(request.key, HeldRequest):
                self._release.settle(request.key, "cancelled")

    def on_control(self, message: Message) -> None:
        try:
            control: RouterControl = decode(RouterControl, message.data)  # type: ignore[arg-type]  # a union as a value
        except WireError as error:
            self._malformed("control", error)
            return
        if not message.reply:
            return
        answer = self.explain(control.id) if isinstance(control, Explain) else self._state.inspection(self._router)
        self._messaging.send(message.reply, encode(answer))

    def explain(self, request_id: str) -> Explanation:
        now = self._loop.time()
        explanation = self._scheduler.explain(request_id, now)
        if explanation is None:
            return Explanation(id=request_id, known=False, router=self._router)
        offset_s = self._wall() - now

        def told(one: D) -> D:
            return msgspec.structs.replace(one, router=self._router, at=one.at + offset_s)

        return msgspec.structs.replace(told(explanation), earlier=[told(one) for one in explanation.earlier])

    def _malformed(self, kind: str, error: WireError) -> None:
        broker_metrics.MALFORMED.labels(kind).inc()
        log.error("message.malformed", kind=kind, pool=self._pool, error=str(error))
