"""The messages that reach a router besides requests: load reports, job events, cancels, and questions of operators."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import structlog

from headrace.broker import metrics as broker_metrics
from headrace.broker.codec import decode, encode
from headrace.broker.errors import WireError
from headrace.broker.messages.control import Decided, Explain, Explanation, RouterControl
from headrace.broker.messages.events import Cancel, JobEvent, JobEvents, LoadReport
from headrace.broker.messages.members import WorkerMember
from headrace.broker.places import place_name, places_of, reports_of, worker_of
from headrace.jetstream.ports import Message, Subscription
from headrace.router.placement.types import WorkerInfo
from headrace.router.session import metrics
from headrace.router.session.metrics import PredictionAccuracy
from headrace.router.session.window import HeldRequest, PoolIndex, RequestWindow, RouterDeps, SchedulingPort

# The places of a pool by its workers' leases, handed on to the scheduler, and the detection of those without cache events.
#
# A place is a worker or, where its engine has several, one of its data-parallel ranks (`headrace.broker.places`). A worker
# whose engine cannot publish cache events says so in its lease. A worker that promises them and then serves request after
# request without a single event is detected here. Either way its cache is guessed from placements until an event comes.

log = structlog.get_logger()

REMOTE_LIMIT = 20_000  # requests remembered


def pool_blocks(member: WorkerMember, block_size: int) -> int:
    return max(member.block_size // block_size, 1) if block_size else 1


def worker_info(member: WorkerMember, *, kv_events: bool, block_size: int = 0) -> WorkerInfo:
    """Translate a lease for the scheduler. `kv_events`: the worker really sends cache events, which its lease only promises.

    `block_size`: tokens of the pool's blocks, in which the scheduler counts; 0 = those of the worker.
    """
    each = pool_blocks(member, block_size)
    return WorkerInfo(
        worker=member.worker,
        slots=member.slots,
        blocks=member.blocks * each,
        block_size=member.block_size // each,
        pool_blocks=each,
        step_tokens=member.step_tokens,
        draining=member.draining,
        waking=member.waking,
        labels=frozenset(member.labels),
        adapters=frozenset(member.adapters),
        kv_events=kv_events,
        epoch=member.epoch,
        start_s=member.start_s,
        zone=member.zone,
        fleet=member.fleet,
        price=member.price,
        context=member.max_model_len,
        role=member.role,
        handover=member.handover,
    )


@dataclass(slots=True)
class _KnownWorker:
    member: WorkerMember
    approximate: bool
    heard: tuple[int, int] | None = None  # the last cache event that counted
    silent_prefills: int = 0
    silent_since_s: float = 0.0


class Roster:
    """Tells the scheduler which workers there are, and the view which of them publish no cache events."""

    def __init__(self, deps: RouterDeps, scheduler: SchedulingPort, index: PoolIndex | None) -> None:
        self._pool = deps.pool
        self._members = deps.members
        self._block_size = deps.block_size
        self._options = deps.options
        self._scheduler = scheduler
        self._view = index.view if index is not None else None
        self._caches = index.events if index is not None else None
        self._workers: dict[str, _KnownWorker] = {}
        self._remote: dict[str, None] = {}  # requests whose prompts other workers compute

    def refresh(self, now_s: float) -> bool:
        members = self._members.workers(self._pool)
        live = places_of({name: member for name, member in members.items() if member.role != "encode"})
        changed = False
        for worker in [name for name in self._workers if name not in live]:
            del self._workers[worker]
            self._scheduler.remove_worker(worker, now_s)
            changed = True
        for worker, member in live.items():
            known = self._workers.get(worker)
            if known is not None and known.member == member:
                continue
            self._put(member, known, now_s)
            changed = True
        if changed:
            serving = {worker_of(place) for place, known in self._workers.items() if known.member.serves}
            metrics.WORKERS.labels(self._pool).set(len(serving))
            metrics.PREFILL_WORKERS.labels(self._pool).set(len({worker_of(place) for place in self._workers} - serving))
            metrics.PLACES.labels(self._pool).set(len(self._workers))
            self._count()
        return changed

    def _put(self, member: WorkerMember, known: _KnownWorker | None, now_s: float) -> None:
        if known is None:
            heard = self._caches is not None and self._caches.known(member.worker) is not None
            known = self._workers[member.worker] = _KnownWorker(member, approximate=not member.kv_events and not heard)
            if known.approximate:
                self._warn(member.worker, "its engine publishes no cache events")
            self._set_view_mode(known)
        elif known.member.role != member.role:
            log.info("worker.role", worker=member.worker, pool=self._pool, role=member.role, before=known.member.role)
        known.member = member
        self._scheduler.put_worker(worker_info(member, kv_events=not known.approximate, block_size=self._block_size), now_s)

    def on_event(self, event: JobEvent, now_s: float) -> None:
        """Suspect a worker that computes prompts and never publishes what it keeps of them.

        Requests whose blocks come from a prefill worker do not count: their worker has computed nothing.
        """
        if event.kind == "placed" and event.prefill:
            self._remote[event.id] = None
            if len(self._remote) > REMOTE_LIMIT:
                del self._remote[next(iter(self._remote))]
            return
        if event.kind in ("placed", "started"):
            return
        if event.id in self._remote:
            del self._remote[event.id]
            return
        if event.kind != "prefilled" or self._caches is None:
            return
        known = self._workers.get(event.worker)
        if known is None or known.approximate or event.uncached < 2 * known.member.block_size or not known.member.block_size:
            return
        heard = self._caches.known(event.worker)
        if heard != known.heard or not known.silent_prefills:
            known.heard, known.silent_prefills, known.silent_since_s = heard, 0, now_s
        known.silent_prefills += 1
        if known.silent_prefills <= self._options.silent_prefills or now_s - known.silent_since_s < self._options.silent_s:
            return
        known.approximate = True
        self._caches.distrust(event.worker)
        self._set_view_mode(known)
        self._scheduler.put_worker(worker_info(known.member, kv_events=False, block_size=self._block_size), now_s)
        self._warn(event.worker, f"{known.silent_prefills} prefills and no cache event")
        self._count()

    def trust_senders(self, now_s: float) -> None:
        """Call workers exact again that were guessed and have sent an event: the view has been told by the event already."""
        for worker, known in self._workers.items():
            if known.approximate and self._caches is not None and self._caches.known(worker) is not None:
                known.approximate = False
                known.silent_prefills = 0
                self._scheduler.put_worker(worker_info(known.member, kv_events=True, block_size=self._block_size), now_s)
                log.info("worker.exact", worker=worker, pool=self._pool)
                self._count()

    def _set_view_mode(self, known: _KnownWorker) -> None:
        if self._view is not None:
            member = known.member
            blocks = member.blocks * pool_blocks(member, self._block_size)
            self._view.add_worker(member.worker, approximate=known.approximate, capacity_blocks=blocks)

    def _count(self) -> None:
        metrics.APPROXIMATE.labels(self._pool).set(sum(known.approximate for known in self._workers.values()))

    def _warn(self, worker: str, why: str) -> None:
        log.warning("worker.approximate", worker=worker, pool=self._pool, why=why)


D = TypeVar("D", bound=Decided)


class RouterInbox:
    def __init__(
        self,
        deps: RouterDeps,
        window: RequestWindow,
        roster: Roster,
        accuracy: PredictionAccuracy,
    ) -> None:
        self._messaging = deps.messaging
        self._subjects = deps.subjects
        self._pool = deps.pool
        self._router = deps.router
        self._wall = deps.wall
        self._window = window
        self._scheduler = window.scheduler
        self._roster = roster
        self._accuracy = accuracy
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
        now = self._loop.time()
        for part in reports_of(report):
            self._scheduler.on_report(part, now)
        self._window.changed.set()

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
            if event.kind == "started":
                continue
            if event.kind != "placed":
                self._accuracy.on_event(event, now)
            self._roster.on_event(event, now)
        self._window.changed.set()

    def on_cancel(self, message: Message) -> None:
        """Settle the cancelled requests that wait, and remember all cancelled ids for those that have not arrived yet."""
        try:
            ids = decode(Cancel, message.data).ids
        except WireError as error:
            self._malformed("cancel", error)
            return
        now = self._loop.time()
        for request_id in ids:
            self._window.tombstones.add(request_id, now)
        for request in self._scheduler.cancel(ids):
            if isinstance(request.key, HeldRequest):
                self._window.settle(request.key, "cancelled")

    def on_control(self, message: Message) -> None:
        try:
            control: RouterControl = decode(RouterControl, message.data)  # type: ignore[arg-type]  # a union as a value
        except WireError as error:
            self._malformed("control", error)
            return
        if not message.reply:
            return
        answer = self.explain(control.id) if isinstance(control, Explain) else self._window.inspection(self._router)
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
