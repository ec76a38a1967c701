"""Intake: pulls the requests of a pool into the window and offers them to the scheduler.

The server serves routers (priority 0) before workers that place on themselves (9).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import islice

import structlog

from headrace.broker import metrics as broker_metrics
from headrace.broker.codec import decode, encode, log_ids, parse_job_headers, unpack_u64
from headrace.broker.dead_letters import FailedDeliveries, dead_letter, note_failure
from headrace.broker.errors import WireError
from headrace.broker.messages.control import Suspicion, SuspicionQuery
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.operator import Operated, Wake
from headrace.broker.protocol.quarantine import limit_by_header
from headrace.jetstream.errors import JetStreamError, NoResponder, NotConnected, RequestTimeout
from headrace.jetstream.ports import Delivery, PullLoop
from headrace.jetstream.subjects import REQUEST_CLASSES, RequestClass
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import request_consumer
from headrace.router.placement.types import Shed, Waiting
from headrace.router.session import metrics
from headrace.router.session.placing import Refuser, fault_of
from headrace.router.session.window import HeldRequest, RequestHead, RequestWindow, RouterDeps

# Wakes sleeping workers of a pool for waiting requests that no worker in service may take (`wake_on_demand`).

LOOKED_AT = 256  # waiting requests per look; those behind them wait for the next one


def worker_to_wake(
    waiting: Iterable[RequestHead],
    members: Collection[WorkerMember],
    *,
    asked: Collection[str] = (),
    resting: Collection[str] = (),
) -> str | None:
    """Return the id of the worker to wake; None if none has to be.

    A request that a worker in service may take, or one that is waking or `asked` to, wakes no other.  Among the sleeping ones
    the lightest sleep comes first, then the name, so that all routers of a pool choose the same one.  `resting` are not to be
    woken now.
    """
    serving = [member for member in members if member.serves]
    up = [member for member in serving if member.waking or not member.draining or member.worker in asked]
    asleep = [member for member in serving if member.sleeping and member not in up and member.worker not in resting]
    if not asleep:
        return None
    for wants in islice(waiting, LOOKED_AT):
        if any(_may_take(wants, member) for member in up):
            continue
        able = [member for member in asleep if _may_take(wants, member)]
        if able:
            return min(able, key=lambda member: (member.sleeping, member.worker)).worker
    return None


def _may_take(wants: RequestHead, member: WorkerMember) -> bool:
    if wants.worker and wants.worker != member.worker:
        return False
    if wants.adapter and wants.adapter not in member.adapters:
        return False
    return not set(wants.require) - set(member.labels)


log = structlog.get_logger()

LOOK_S = 0.1  # how often the window is looked at
ANSWER_S = 1000.0  # a worker may read its weights again and warm up before it answers
REST_S = 10.0  # a worker that could not be woken is left alone for so long


class Waker:
    """Wakes workers while `run` runs. Other routers may choose the same one: a second wake does nothing."""

    def __init__(self, deps: RouterDeps, window: RequestWindow) -> None:
        self._messaging = deps.messaging
        self._subjects = deps.subjects
        self._members = deps.members
        self._pool = deps.pool
        self._window = window
        self._resting: dict[str, float] = {}  # worker → until when

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            asked: dict[str, asyncio.Task[None]] = {}
            while True:
                await asyncio.sleep(LOOK_S)
                if not len(self._window) or not self._window.granted:
                    continue
                now = loop.time()
                self._resting = {worker: until_s for worker, until_s in self._resting.items() if until_s > now}
                asked = {worker: task for worker, task in asked.items() if not task.done()}
                waiting = (held.head for held in self._window if held.waiting)
                members = self._members.workers(self._pool).values()
                chosen = worker_to_wake(waiting, members, asked=asked, resting=self._resting)
                if chosen is not None:
                    asked[chosen] = tasks.create_task(self._wake(chosen))

    async def _wake(self, worker: str) -> None:
        log.info("worker.waking", worker=worker, pool=self._pool, waiting=len(self._window))
        subject = self._subjects.operate_worker(self._pool, worker)
        try:
            answer = decode(Operated, await self._messaging.request(subject, encode(Wake()), timeout_s=ANSWER_S))
            why = "" if answer.ok else answer.message
        except (JetStreamError, WireError) as error:
            why = str(error)
        metrics.WAKES.labels(self._pool, "failed" if why else "woken").inc()
        if why:
            self._resting[worker] = asyncio.get_running_loop().time() + REST_S
            log.warning("worker.not_woken", worker=worker, pool=self._pool, why=why)
        else:
            log.info("worker.woken", worker=worker, pool=self._pool)


ROUTER_PRIORITY = 0


class Intake:
    """Receives requests while `run` runs."""

    def __init__(
        self,
        deps: RouterDeps,
        tasks: TaskScope,
        window: RequestWindow,
        refuser: Refuser,
        place_now: Callable[[HeldRequest, Waiting], bool] = lambda _held, _request: False,
    ) -> None:
        """`place_now` is asked first, and says whether it has placed the request."""
        self._messaging = deps.messaging
        self._subjects = deps.subjects
        self._pool = deps.pool
        self._timing = deps.options.timing
        self._wall = deps.wall
        self._tasks = tasks
        self._window = window
        self._scheduler = window.scheduler
        self._refuser = refuser
        self._place_now = place_now
        self._pulls: list[PullLoop] = []
        self._failures = FailedDeliveries(deps.messaging, deps.subjects, pool=deps.pool, kind="request", wall=deps.wall)
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for request_class in REQUEST_CLASSES:
                consumer = request_consumer(self._subjects, self._pool, request_class)
                pull = self._messaging.pull(
                    consumer.stream,
                    consumer.name,
                    self._failures.guard(partial(self._on_delivery, request_class=request_class), after=self._window.balance),
                    priority=ROUTER_PRIORITY,
                    on_missing=lambda spec=consumer: self._messaging.ensure_consumer(spec),  # type: ignore[misc]
                )
                self._pulls.append(pull)
                self._window.pull(request_class, pull)
                tasks.create_task(pull.run())
            self._window.balance()

    async def stop(self) -> None:
        for pull in self._pulls:
            await pull.stop()

    def _on_delivery(self, delivery: Delivery, request_class: RequestClass) -> None:
        if (old := self._window.at(delivery, request_class)) is not None:
            if old.delivery.data == delivery.data:
                old.delivery = delivery  # delivered again: the last one is to be acknowledged
                self._window.balance()
                return
            self._forget_displaced(old)
        if not self._window.granted:
            delivery.nak()
            return
        try:
            head = decode(RequestHead, delivery.data)
            attempt, history = parse_job_headers(delivery.headers)
            chain = unpack_u64(head.hashes)
        except WireError as error:
            broker_metrics.MALFORMED.labels("request").inc()
            log.error("request.malformed", subject=delivery.subject, seq=delivery.stream_seq, error=str(error))
            dead_letter(self._messaging, self._subjects, self._pool, delivery, str(error), wall=self._wall)
            self._window.balance()
            return
        held = HeldRequest(delivery, head, attempt, history, request_class)
        if head.id in self._window.tombstones:
            metrics.DROPPED.labels("cancelled").inc()
            delivery.ack()
            self._window.balance()
        elif self._only_copy(held):
            metrics.RECEIVED_OF[request_class].inc()
            self._window.add(held)
            try:
                self._offer(held, chain)
            except Exception:  # the message is buried, and nothing of it may stay here
                self._scheduler.cancel([held.id])
                self._window.remove(held)
                raise
        else:
            delivery.nak(self._timing.retry_s)
            self._window.balance()

    def _forget_displaced(self, old: HeldRequest) -> None:
        """Remove a request without an ack: its sequence is another request's now. Its judge submits it again."""
        log.warning("request.displaced", **log_ids(old.head), seq=old.delivery.stream_seq)
        metrics.DROPPED.labels("displaced").inc()
        if old.waiting:
            self._scheduler.cancel([old.id])
        self._window.remove(old)

    def _only_copy(self, held: HeldRequest) -> bool:
        """Return whether `held` may enter the window: no other copy of its request is there, or an earlier attempt waits.

        A copy of an earlier attempt that waits is given back; the server delivers it again.
        """
        other = self._window.of(held.head.id)
        if other is None:
            return True
        if not other.waiting or other.attempt >= held.attempt:
            return False
        self._scheduler.cancel([other.id])
        self._window.remove(other)
        other.delivery.nak(self._timing.retry_s)
        return True

    def _offer(self, held: HeldRequest, chain: list[int]) -> None:
        head = held.head
        now, wall = self._loop.time(), self._wall()
        suspect = limit_by_header(held.history) > 0
        request = Waiting(
            id=head.id,
            key=held,
            name=head.name,
            attempt=held.attempt,
            tokens=head.tokens,
            max_tokens=head.max_tokens,
            choices=head.choices,
            chain=chain,
            block_size=head.block_size,
            request_class=held.request_class,
            tenant=head.tenant,
            priority=head.priority,
            arrived_s=now - max(0.0, wall - head.created) if head.created else now,
            entered_s=now,
            deadline_s=now + head.deadline - wall,
            adapter=head.adapter,
            session=head.session,
            affinity=head.affinity,
            worker=head.worker,
            ttft_target_s=head.ttft_target_s,
            itl_target_s=head.itl_target_s,
            agent_priority=head.agent_priority,
            failures=len(held.history),
            require=frozenset(head.require),
            prefer=head.prefer,
            suspect=suspect,
        )
        if self._place_now(held, request):
            return
        shed = self._scheduler.offer(request, now)
        if isinstance(shed, Shed):
            self._refuser.refuse(held, fault_of(shed))
            return
        if suspect:
            self._ask(held)
        self._window.changed.set()

    # Suspects.

    def _ask(self, held: HeldRequest) -> None:
        """Begin to ask the judge of a request that waits. The scheduler does not place it before it knows."""
        self._tasks.spawn_guarded(self._assess(held), lambda error: note_failure("suspicion", error, **log_ids(held.head)))

    async def _assess(self, held: HeldRequest) -> None:
        found = await self._suspicion(held)
        self._window.scheduler.assess(held.id, limit=found.limit, crashes=found.crashes)
        self._window.changed.set()

    async def _suspicion(self, held: HeldRequest) -> Suspicion:
        """Return the judge's answer, or without one what the history says at worst."""
        question = encode(SuspicionQuery(id=held.id, history=held.history))
        try:
            answer = await self._messaging.request(
                self._subjects.judge(held.head.judge), question, timeout_s=self._timing.rpc_timeout_s
            )
            return decode(Suspicion, answer)
        except (NoResponder, RequestTimeout, NotConnected) as error:
            log.info("suspicion.unanswered", **log_ids(held.head), judge=held.head.judge, error=str(error))
        except WireError as error:
            broker_metrics.MALFORMED.labels("reply").inc()
            log.error("reply.malformed", judge=held.head.judge, error=str(error))
        return Suspicion(limit=limit_by_header(held.history), crashes=len(held.history))
