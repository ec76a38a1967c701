"""Self-placement: a worker places requests on itself while no router lease is live in its pool.

Never beyond the worker's free slots, and through WORK exactly as a router would: publish, event, then ack.  On the
`prioritized` consumers of REQ a worker asks at priority 9: a router that comes back is served first.

Several messages may be on their way at once.  One at a time, as the protocol was first written, costs two round trips to the
server per request in sequence, which measured 390 requests/s with both cores three quarters idle; nothing in the
protocol's safety rests on the order of placements.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode_request, job_headers, log_ids, parse_job_headers
from headrace.broker.dead_letters import FailedDeliveries, dead_letter
from headrace.broker.errors import WireError
from headrace.broker.membership.janitor import rendezvous_first
from headrace.broker.membership.members import Members
from headrace.broker.membership.mover import message_ttl_s
from headrace.broker.messages.control import HistoryEntry
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.requests import Envelope
from headrace.broker.worker.outbox import EventSender
from headrace.broker.worker.runs import Preemption
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge, QueueFull
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Delivery, PullLoop
from headrace.jetstream.subjects import BATCH_CLASSES, REQUEST_CLASSES, RequestClass
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import request_consumer

log = structlog.get_logger()

WORKER_PRIORITY = 9
ADAPTER_WAIT_S = 10.0  # as long a request waits in the queue for a worker with its adapter, before this one refuses it


class SelfPlacer:
    """Pulls REQ for one worker. `enabled` can be switched off, for tests."""

    def __init__(
        self,
        deps: WorkerDeps,
        state: WorkerState,
        lease: LeaseKeeper,
        members: Members,
        events: EventSender,
        preemption: Preemption,
    ) -> None:
        self._messaging = deps.messaging
        self._subjects = deps.subjects
        self._timing = deps.timing
        self._wall = deps.wall
        self._burst = deps.settings.self_place_burst
        self._state = state
        self._lease = lease
        self._members = members
        self._events = events
        self._preemption = preemption
        self.enabled = deps.settings.self_place
        self._failures = FailedDeliveries(deps.messaging, deps.subjects, pool=state.pool, kind="request", wall=deps.wall)
        self._pulls: dict[RequestClass, PullLoop] = {}
        self._asking = False  # requests are open: most workers have a router, and nothing to ask for
        self._holding: dict[Delivery, None] = {}
        self._tasks = TaskScope()
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        async with self._tasks:
            for request_class in REQUEST_CLASSES:
                consumer = request_consumer(self._subjects, self._state.pool, request_class)
                pull = self._messaging.pull(
                    consumer.stream,
                    consumer.name,
                    self._failures.guard(partial(self._on_request, request_class=request_class), after=self.balance),
                    priority=WORKER_PRIORITY,
                    on_missing=partial(self._messaging.ensure_consumer, consumer),
                )
                self._pulls[request_class] = pull
                self._tasks.spawn(pull.run())
            self._tasks.spawn(self._hold())
            self.balance()

    async def stop(self) -> None:
        """Take nothing more in. The tasks of `run` finish what is being placed."""
        for pull in self._pulls.values():
            await pull.stop()

    def balance(self) -> None:
        """Ask for messages of each class while there is room. To be called whenever a slot or a permission changes.

        When only the room shrinks, open requests stay open: withdrawing them costs more than giving back what they may bring.
        """
        if not self._may_place():
            if self._asking:
                self._asking = False
                for pull in self._pulls.values():
                    pull.add_credit(-pull.credit)
            return
        self._asking = True
        room = self._state.room
        for_batch = max(0, min(room, self._burst))
        for_others = max(0, min(room + self._preemption.slots, self._burst))
        for request_class, pull in self._pulls.items():
            wanted = for_batch if request_class in BATCH_CLASSES else for_others
            if pull.credit < wanted:
                pull.add_credit(wanted - pull.credit)

    def _room(self, request_class: RequestClass) -> int:
        return self._state.room + (0 if request_class in BATCH_CLASSES else self._preemption.slots)

    def _may_place(self) -> bool:
        """Return True while the lease is held, the worker takes requests, and no router lease is live in its pool."""
        return (
            self.enabled
            and self._lease.held
            and self._state.taking
            and self._state.member.serves
            and not self._members.has_router(self._state.pool)
        )

    def _elsewhere(self, envelope: Envelope) -> str:
        """Choose a worker for a request whose adapter this one lacks, or which is too long for its context.

        Empty: this worker takes it, also to refuse it.
        """
        if self._state.usable(envelope.adapter) and _fits(self._state.member, envelope):
            return ""
        having = [m for m in self._members.having(self._state.pool, envelope.adapter) if _fits(m, envelope)]
        return rendezvous_first(envelope.id, [m.worker for m in having if m.worker != self._state.worker]) or ""

    def _waits(self, envelope: Envelope) -> bool:
        """Return whether no worker has the adapter of a request that may wait for one: its worker may be restarting."""
        return not self._state.usable(envelope.adapter) and self._wall() - envelope.created < ADAPTER_WAIT_S

    def _on_request(self, delivery: Delivery, *, request_class: RequestClass) -> None:
        try:
            envelope = decode_request(delivery.data)
            attempt, history = parse_job_headers(delivery.headers)
        except WireError as error:
            metrics.MALFORMED.labels("request").inc()
            log.error("request.malformed", subject=delivery.subject, seq=delivery.stream_seq, error=str(error))
            dead_letter(self._messaging, self._subjects, self._state.pool, delivery, str(error), wall=self._wall)
            self.balance()
            return
        if envelope.id in self._state.tombstones:
            delivery.ack()
        elif self._may_place() and (worker := self._elsewhere(envelope)):
            self._spawn(delivery, self._place(delivery, envelope, attempt, history, worker=worker))
        elif self._waits(envelope):
            delivery.nak(self._timing.retry_s)
        elif self._room(request_class) < 1 or not self._may_place():
            delivery.nak()  # several classes were answered at once and the slot is taken: another worker may have one
        else:
            self._state.placed(envelope.id, attempt, self._loop.time())
            self._spawn(delivery, self._place(delivery, envelope, attempt, history, worker=self._state.worker))
        self.balance()

    def _spawn(self, delivery: Delivery, placing: Coroutine[Any, Any, None]) -> None:
        self._tasks.spawn_guarded(placing, lambda error: self._failures.bury(delivery, error))

    async def _place(
        self, delivery: Delivery, envelope: Envelope, attempt: int, history: list[HistoryEntry], *, worker: str
    ) -> None:
        self._holding[delivery] = None
        headers = job_headers(attempt, history)
        try:
            while True:
                try:
                    ack = await self._messaging.publish(
                        self._subjects.work(self._state.pool, worker),
                        delivery.data,
                        headers=headers,
                        msg_id=f"{envelope.id}.{attempt}@{delivery.stream_seq}",
                        ttl_s=message_ttl_s(envelope.deadline, self._wall(), self._timing.ttl_slack_s),
                        timeout_s=self._timing.publish_timeout_s,
                    )
                except QueueFull:
                    self._state.arrived(envelope.id, attempt)
                    delivery.nak(self._timing.retry_s)
                    return
                except PayloadTooLarge as error:  # its headers have grown beyond what the server takes
                    self._state.arrived(envelope.id, attempt)
                    self._failures.bury(delivery, error)
                    return
                except JetStreamError as error:  # unknown outcome: the same subject and id until it is known
                    log.warning("place.retry", **log_ids(envelope), attempt=attempt, error=str(error))
                    await asyncio.sleep(self._timing.retry_s)
                else:
                    break
            if ack.duplicate:
                self._state.arrived(envelope.id, attempt)
            else:
                metrics.PLACED.inc()
                if worker == self._state.worker:
                    self._events.add("placed", envelope.id, attempt, envelope.tokens)
            delivery.ack()
        finally:
            self._holding.pop(delivery, None)
            self.balance()

    async def _hold(self) -> None:
        """Extend the claims on REQ of what is still being placed, and forget placements that never arrived."""
        while True:
            await asyncio.sleep(self._timing.ack_wait_s / 3)
            for delivery in self._holding:
                delivery.progress()
            self._state.forget_placed(self._loop.time())
            self.balance()


def _fits(member: WorkerMember, envelope: Envelope) -> bool:
    return not member.max_model_len or envelope.tokens + max(envelope.max_tokens, 1) <= member.max_model_len
