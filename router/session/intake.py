"""Pulls the requests of a pool and offers them to the scheduler.

Each class has a window of its own: a window full of ordinary requests must not keep urgent and moved ones out.  The server
serves routers (priority 0) before workers that place on themselves (9).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from headrace.broker import metrics as broker_metrics
from headrace.broker.codec import parse_job_headers, unpack_u64
from headrace.broker.dead_letters import dead_letter
from headrace.broker.errors import WireError
from headrace.broker.messages import JobFault
from headrace.broker.protocol.crashes import ALONE_FROM, suspected
from headrace.broker.protocol.runs import Tombstones
from headrace.jetstream.ports import Delivery, Messaging, PullLoop
from headrace.jetstream.subjects import REQUEST_CLASSES, RequestClass, Subjects
from headrace.jetstream.topology import request_consumer
from headrace.router.placement.types import Shed, Waiting
from headrace.router.session import metrics
from headrace.router.session.ports import Scheduling
from headrace.router.session.refusals import fault_of
from headrace.router.session.window import HeldRequest, RequestWindow, decode_head
from headrace.router.settings import SessionOptions

log = structlog.get_logger()

ROUTER_PRIORITY = 0


class Intake:
    """The way in. `run` must be running."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        window: RequestWindow,
        scheduler: Scheduling,
        tombstones: Tombstones,
        *,
        pool: str,
        options: SessionOptions,
        may_take: Callable[[], bool],
        on_offered: Callable[[], None],
        refuse: Callable[[HeldRequest, JobFault], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`may_take`: this router may hold requests. `on_offered`: one more waits."""
        self._messaging = messaging
        self._subjects = subjects
        self._window = window
        self._scheduler = scheduler
        self._tombstones = tombstones
        self._pool = pool
        self._options = options
        self._retry_s = options.timing.retry_s
        self._may_take = may_take
        self._on_offered = on_offered
        self._refuse = refuse
        self._wall = wall
        self._loops: dict[RequestClass, PullLoop] = {}
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for request_class in REQUEST_CLASSES:
                consumer = request_consumer(self._subjects, self._pool, request_class)
                loop = self._messaging.pull(
                    consumer.stream,
                    consumer.name,
                    lambda delivery, c=request_class: self._on_delivery(delivery, c),  # type: ignore[misc]
                    priority=ROUTER_PRIORITY,
                    on_missing=lambda spec=consumer: self._messaging.ensure_consumer(spec),  # type: ignore[misc]
                )
                self._loops[request_class] = loop
                tasks.create_task(loop.run())
            self.balance()

    async def stop(self) -> None:
        """Take nothing more in."""
        for loop in self._loops.values():
            await loop.stop()

    def balance(self) -> None:
        """Ask for as many requests of each class as its window has room for; called whenever room or permission changes."""
        allowed = self._may_take() and self._window.bytes < self._options.window_bytes
        for request_class, loop in self._loops.items():
            wanted = max(0, self._options.window - self._window.count(request_class)) if allowed else 0
            if loop.credit < wanted or (loop.credit and not allowed):
                loop.add_credit(wanted - loop.credit)

    def _on_delivery(self, delivery: Delivery, request_class: RequestClass) -> None:
        if (old := self._window.displaced(delivery, request_class)) is not None:
            self._let_go(old)
        if self._window.redelivered(delivery, request_class):
            self.balance()
            return
        if not self._may_take():
            delivery.nak()
            return
        try:
            head = decode_head(delivery.data)
            attempt, history = parse_job_headers(delivery.headers)
            chain = unpack_u64(head.hashes)
        except WireError as error:
            broker_metrics.MALFORMED.labels("request").inc()
            log.error("request.malformed", subject=delivery.subject, seq=delivery.stream_seq, error=str(error))
            dead_letter(self._messaging, self._subjects, self._pool, delivery, str(error), wall=self._wall)
            self.balance()
            return
        held = HeldRequest(delivery, head, attempt, history, request_class)
        if head.id in self._tombstones:
            metrics.DROPPED.labels("cancelled").inc()
            delivery.ack()
            self.balance()
        elif self._makes_way(held):
            metrics.RECEIVED_OF[request_class].inc()
            self._window.add(held)
            self._offer(held, chain)
        else:
            delivery.nak(self._retry_s)
            self.balance()

    def _let_go(self, old: HeldRequest) -> None:
        """No ack: its sequence is another request's now. Its judge submits it again."""
        log.warning("request.displaced", request_id=old.id, seq=old.delivery.stream_seq)
        metrics.DROPPED.labels("displaced").inc()
        if old.state == "waiting":
            self._scheduler.cancel([old.id])
        self._window.remove(old)

    def _makes_way(self, held: HeldRequest) -> bool:
        """One copy of a request is looked at at a time. A later attempt goes first; the other one comes again."""
        other = self._window.of(held.id)
        if other is None:
            return True
        if other.state != "waiting" or other.attempt >= held.attempt:
            return False
        self._scheduler.cancel([other.id])
        self._window.remove(other)
        other.delivery.nak(self._retry_s)
        return True

    def _offer(self, held: HeldRequest, chain: list[int]) -> None:
        head = held.head
        now, wall = self._loop.time(), self._wall()
        shed = self._scheduler.offer(
            Waiting(
                id=head.id,
                key=held,
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
                deadline_s=now + head.deadline - wall,
                adapter=head.adapter,
                session=head.session,
                affinity=head.affinity,
                worker=head.worker,
                require=frozenset(head.require),
                prefer=head.prefer,
                alone=suspected(held.history) >= ALONE_FROM,
            ),
            now,
        )
        if isinstance(shed, Shed):
            self._refuse(held, fault_of(shed))
        else:
            self._on_offered()
