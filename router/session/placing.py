"""Decisions of a router session carried out: the loop that asks the scheduler, placements, refusals and announcements."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import lru_cache, partial

import msgspec
import structlog

from headrace.broker import metrics as broker_metrics
from headrace.broker.codec import decode, encode, job_headers, log_ids, pack_u64, prefill_header
from headrace.broker.dead_letters import FailedDeliveries, fault_of_failure, note_failure
from headrace.broker.errors import DeadlineExceeded, WireError
from headrace.broker.membership.mover import message_ttl_s
from headrace.broker.messages.control import Refuse, RefuseReply
from headrace.broker.messages.events import JobEvent, JobEvents
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.requests import HEADER_KEPT, HEADER_RANK
from headrace.broker.places import rank_of, worker_of
from headrace.jetstream.errors import JetStreamError, NoResponder, NotConnected, PayloadTooLarge, QueueFull, RequestTimeout
from headrace.jetstream.tasks import TaskScope
from headrace.router.placement.disagg_planner import announced
from headrace.router.placement.types import Placement, Shed, Waiting
from headrace.router.session import metrics
from headrace.router.session.metrics import PredictionAccuracy, SuspectWaits, count_decision
from headrace.router.session.window import HeldRequest, RequestState, RequestWindow, RouterDeps
from headrace.router.settings import SessionOptions

MAX_HASHES = 512  # of new blocks in one event


log = structlog.get_logger()

RETRY_AFTER_S = 1.0


def fault_of(shed: Shed) -> JobFault:
    """Translate a scheduler's refusal for the client. Without a time to wait it would count as a failure of the engine."""
    if shed.code == "deadline":
        return JobFault(DeadlineExceeded.code, shed.message, retriable=True)
    after_s = shed.retry_after_s if shed.retry_after_s is not None else RETRY_AFTER_S
    return JobFault(shed.code, shed.message, retriable=True, retry_after_s=after_s)


class Refuser:
    """Refuses requests of one pool, at most `max_refusing` at once, each in a task of `tasks`."""

    def __init__(self, deps: RouterDeps, tasks: TaskScope, window: RequestWindow) -> None:
        self._messaging = deps.messaging
        self._subjects = deps.subjects
        self._members = deps.members
        self._timing = deps.options.timing
        self._slots = asyncio.Semaphore(deps.options.max_refusing)
        self._tasks = tasks
        self._window = window
        self._failures = FailedDeliveries(deps.messaging, deps.subjects, pool=deps.pool, kind="refusal", wall=deps.wall)
        self.in_flight = 0
        self._running: set[asyncio.Task[None]] = set()

    def refuse(self, held: HeldRequest, fault: JobFault) -> None:
        held.refuse()
        self.in_flight += 1
        task = self._tasks.spawn_guarded(self._refuse(held, fault), lambda error: self._failed(held, error))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _failed(self, held: HeldRequest, error: Exception) -> None:
        self._failures.bury(held.delivery, error)
        self._window.settle(held, "failed")

    def abandon(self) -> None:
        for task in self._running:
            task.cancel()

    async def _refuse(self, held: HeldRequest, fault: JobFault) -> None:
        try:
            async with self._slots:
                verdict = await self._ask(held, fault)
        finally:
            self.in_flight -= 1
        if verdict is None:
            self._window.give_back(held)
            return
        metrics.SHED.labels(fault.code).inc()
        log.info("request.shed", **log_ids(held.head), code=fault.code, verdict=verdict, tenant=held.head.tenant)
        self._window.settle(held, "refused")

    async def _ask(self, held: HeldRequest, fault: JobFault) -> str | None:
        """Return the judge's verdict, or `judge gone`; None if this router may not work any more before there is one."""
        judge = held.head.judge
        subject = self._subjects.judge(judge)
        question = encode(Refuse(id=held.id, attempt=held.attempt, fault=fault))
        while self._window.granted:
            try:
                answer = await self._messaging.request(subject, question, timeout_s=self._timing.rpc_timeout_s)
                return decode(RefuseReply, answer).verdict
            except (NoResponder, RequestTimeout, NotConnected) as error:
                # Silence is a suspicion, never a verdict.
                log.debug("judge.silent", judge=judge, error=str(error))
            except WireError as error:
                broker_metrics.MALFORMED.labels("reply").inc()
                log.error("reply.malformed", judge=judge, error=str(error))
            if await self._members.ingress_gone(judge):
                return "judge gone"
            await asyncio.sleep(self._timing.retry_s)
        return None


# Publishing of placed requests to their workers, many at once.
#
# An outcome that is not known is tried again on the same subject under the same message id until it is known: another worker
# in its place could mean two copies. Nothing in the protocol's safety rests on this; it saves work.


class Placer:
    """Carries out the placements of one pool, each in a task of `tasks`, and announces them to the other routers.

    A request may have left the window while it was being placed, because its stream was deleted and made again.  Then its judge
    submits it again, and the outcome of the old placement changes nothing here.
    """

    def __init__(
        self,
        deps: RouterDeps,
        tasks: TaskScope,
        window: RequestWindow,
        refuser: Refuser,
        accuracy: PredictionAccuracy,
        record: Callable[[HeldRequest, Placement], None] | None = None,
    ) -> None:
        self._messaging = deps.messaging
        self._pool = deps.pool
        self._router = deps.router
        self._timing = deps.options.timing
        self._wall = deps.wall
        self._tasks = tasks
        self._window = window
        self._refuser = refuser
        self._accuracy = accuracy
        self._record = record
        self._loop = asyncio.get_running_loop()
        self._work_of = lru_cache(maxsize=1024)(partial(deps.subjects.work, deps.pool))
        self._events = deps.subjects.events(deps.pool)
        self.in_flight = 0
        metrics.IN_FLIGHT.labels(deps.pool).set_function(lambda: self.in_flight)
        self._running: set[asyncio.Task[None]] = set()
        self._announced: list[JobEvent] = []  # in this turn of the loop

    def place(self, held: HeldRequest, placement: Placement) -> None:
        held.place()
        self.in_flight += 1
        task = self._tasks.spawn_guarded(self._place(held, placement), lambda error: self._failed(held, error))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _failed(self, held: HeldRequest, error: Exception) -> None:
        """Refuse a request that cannot be placed for a reason that no check has foreseen: it must not end the router."""
        note_failure("place", error, **log_ids(held.head))
        self.impossible(held, fault_of_failure(error))

    def abandon(self) -> None:
        for task in self._running:
            task.cancel()

    async def _place(self, held: HeldRequest, placement: Placement) -> None:
        try:
            outcome = await self._publish(held, placement)
        finally:
            self.in_flight -= 1
        if isinstance(outcome, JobFault):
            self.impossible(held, outcome)
        elif outcome == "full":
            metrics.RETRIES.labels("queue_full").inc()
            await asyncio.sleep(self._timing.retry_s)  # the scheduler counts it there meanwhile and takes another one
            self.full(held, placement)
        else:
            self.placed(held, placement, duplicate=outcome == "duplicate")

    async def _publish(self, held: HeldRequest, placement: Placement) -> str | JobFault:
        """Return `stored`, `duplicate`, `full`, or the fault of a message that the server can never store."""
        subject = self._work_of(worker_of(placement.worker))
        headers = job_headers(held.attempt, held.history)
        if (rank := rank_of(placement.worker)) is not None:
            headers[HEADER_RANK] = str(rank)
        if (prefill := placement.prefill) is not None:
            named = msgspec.structs.replace(prefill, worker=worker_of(prefill.worker), rank=rank_of(prefill.worker))
            headers |= prefill_header(named)
        if placement.kept:
            headers[HEADER_KEPT] = "1"
        msg_id = f"{held.head.id}.{held.attempt}@{held.delivery.stream_seq}"
        while True:
            try:
                ack = await self._messaging.publish(
                    subject,
                    held.delivery.data,
                    headers=headers,
                    msg_id=msg_id,
                    ttl_s=message_ttl_s(held.head.deadline, self._wall(), self._timing.ttl_slack_s),
                    timeout_s=self._timing.publish_timeout_s,
                )
            except QueueFull:
                return "full"
            except PayloadTooLarge as error:  # its headers have grown beyond what the server takes
                return JobFault("engine_error", f"the request cannot be placed: {error}")
            except JetStreamError as error:
                metrics.RETRIES.labels("unknown").inc()
                log.warning("place.retry", **log_ids(held.head), attempt=held.attempt, error=str(error))
                await asyncio.sleep(self._timing.retry_s)
            else:
                return "duplicate" if ack.duplicate else "stored"

    # Outcomes.

    def placed(self, held: HeldRequest, placement: Placement, *, duplicate: bool) -> None:
        """Release a request whose message is stored for its worker. A duplicate was announced by the router that stored it."""
        if not duplicate:
            self._announce(held, placement)
        metrics.placed(placement.reason).inc()
        metrics.WAITED_S.observe(placement.waited_s)
        if placement.prefill is not None:
            metrics.PREFILL.labels("remote" if placement.remote else "local", placement.prefill.reason).inc()
        if placement.fleet is not None:
            count_decision(self._pool, placement.fleet)
        self._accuracy.placed(placement)
        if self._record is not None:
            self._record(held, placement)
        self._window.settle(held)
        self._window.changed.set()

    def full(self, held: HeldRequest, placement: Placement) -> None:
        if held.gone:
            return
        window = self._window
        window.scheduler.unplace(placement, self._loop.time())
        held.wait_again()
        if held.id in window.tombstones:
            window.drop(held, "cancelled")
        elif not window.granted:
            window.scheduler.cancel([held.id])
            window.give_back(held)
        window.changed.set()

    def impossible(self, held: HeldRequest, fault: JobFault) -> None:
        if not held.gone:
            self._refuser.refuse(held, fault)

    # Announcements: the `placed` events of one turn of the loop are one message.

    def _announce(self, held: HeldRequest, placement: Placement) -> None:
        if not self._announced:
            self._loop.call_soon(self._send)
        self._announced.append(
            JobEvent(
                "placed",
                held.head.id,
                held.attempt,
                worker_of(placement.worker),
                held.head.tokens,
                placement.uncached,
                len(placement.new_blocks),
                self._router,
                pack_u64(placement.new_blocks[:MAX_HASHES]),
                announced(placement),
                rank_of(placement.worker),
            )
        )

    def _send(self) -> None:
        events, self._announced = self._announced, []
        self._messaging.send(self._events, encode(JobEvents(events=events)))


LEAST_NAP_S = 0.001


class Dispatcher:
    def __init__(
        self,
        options: SessionOptions,
        window: RequestWindow,
        placer: Placer,
        refuser: Refuser,
    ) -> None:
        self._options = options
        self._window = window
        self._scheduler = window.scheduler
        self._placer = placer
        self._refuser = refuser
        self._loop = asyncio.get_running_loop()
        self._decided_s = 0.0
        self._suspect_waits = SuspectWaits(window.pool)

    async def run(self) -> None:
        """Decide after every change, when the scheduler wants to be asked, and every `look_s`, until cancelled."""
        changed = self._window.changed
        while True:
            changed.clear()
            self.dispatch()
            now = self._loop.time()
            nap_s = self._options.look_s
            if (wake_s := self._scheduler.next_wake_s(now)) is not None:
                nap_s = min(nap_s, max(LEAST_NAP_S, wake_s - now))
            timer = self._loop.call_later(nap_s, changed.set)
            try:
                await changed.wait()
            finally:
                timer.cancel()

    @property
    def busy(self) -> bool:
        return bool(self._placer.in_flight or self._refuser.in_flight)

    def abandon(self) -> None:
        self._placer.abandon()
        self._refuser.abandon()

    def place_now(self, held: HeldRequest, request: Waiting) -> bool:
        """Place a request that has just come, if nothing waits, without the next round. Return whether that was done."""
        if self._placer.in_flight >= self._options.max_placing or not self._window.claims_valid:
            return False
        began = time.perf_counter()
        placement = self._scheduler.place_now(request, self._loop.time())
        if placement is None:
            return False
        metrics.DECISION_S.observe(time.perf_counter() - began)
        self._placer.place(held, placement)
        return True

    def dispatch(self) -> None:
        """Carry out what the scheduler decides now.

        Nothing is decided without permission, nor in a process that was frozen: the server has given its requests to others.
        """
        now = self._loop.time()
        if not self._scheduler.waiting and now < self._decided_s + self._options.look_s:
            return  # the scheduler would only forget what is old
        if not self._window.granted:
            return
        if not self._window.claims_valid:
            self._window.give_back_waiting()
            return
        if self._placer.in_flight >= self._options.max_placing:
            return
        self._decided_s = now
        began = time.perf_counter()
        decisions = self._scheduler.decide(now)
        metrics.DECISION_S.observe(time.perf_counter() - began)
        self._suspect_waits.note(self._scheduler.suspects_awaiting_lost, now)
        for decision in decisions:
            held = decision.request.key
            if not isinstance(held, HeldRequest) or held.state is not RequestState.WAITING:
                continue
            if isinstance(decision, Shed):
                self._refuser.refuse(held, fault_of(decision))
            else:
                self._placer.place(held, decision)
