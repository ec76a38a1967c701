"""A worker placing work on itself, while no router lease is live in its pool.

Never beyond the worker's free slots, and through WORK exactly as a router would: publish, event, then ack.  On the
`prioritized` consumers of REQ a worker asks at priority 9: a router that comes back is served first.

Several messages may be on their way at once.  One at a time, as the protocol was first written, costs two round trips to the
server per request in sequence, which measured 390 requests/s with both cores three quarters idle; nothing in the
protocol's safety rests on the order of placements.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, job_headers, parse_job_headers
from headrace.broker.dead_letters import dead_letter
from headrace.broker.errors import WireError
from headrace.broker.membership.mover import message_ttl_s
from headrace.broker.messages import Envelope, HistoryEntry
from headrace.broker.protocol.runs import Tombstones
from headrace.broker.settings import Timing
from headrace.broker.worker.reports import EventSender
from headrace.jetstream.errors import JetStreamError, QueueFull
from headrace.jetstream.ports import Delivery, Messaging, PullLoop
from headrace.jetstream.subjects import REQUEST_CLASSES, RequestClass, Subjects
from headrace.jetstream.topology import request_consumer

log = structlog.get_logger()

WORKER_PRIORITY = 9
PLACED_FORGOTTEN_S = 10.0


class SelfPlacer:
    """Pulls REQ for one worker."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        *,
        pool: str,
        worker: str,
        timing: Timing,
        tombstones: Tombstones,
        burst: int,
        free_slots: Callable[[], int],
        may_place: Callable[[], bool],
        events: EventSender,
        elsewhere: Callable[[Envelope], str] = lambda _envelope: "",
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`free_slots`: slots that no run holds. `may_place`: lease held, not draining, no router. `elsewhere`: the worker that
        must run it, if that is not this one."""
        self._messaging = messaging
        self._subjects = subjects
        self._pool = pool
        self._worker = worker
        self._timing = timing
        self._tombstones = tombstones
        self._burst = burst
        self._free_slots = free_slots
        self._may_place = may_place
        self._events = events
        self._elsewhere = elsewhere
        self._wall = wall
        self._loops: dict[RequestClass, PullLoop] = {}
        self._placed: dict[tuple[str, int], float] = {}  # on the way from REQ to this worker's own consumer
        self._holding: dict[Delivery, None] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for request_class in REQUEST_CLASSES:
                consumer = request_consumer(self._subjects, self._pool, request_class)
                loop = self._messaging.pull(
                    consumer.stream,
                    consumer.name,
                    lambda delivery, c=request_class: self._on_request(delivery, c),  # type: ignore[misc]
                    priority=WORKER_PRIORITY,
                    on_missing=lambda spec=consumer: self._messaging.ensure_consumer(spec),  # type: ignore[misc]
                )
                self._loops[request_class] = loop
                tasks.create_task(loop.run())
            tasks.create_task(self._hold())
            self.balance()

    async def stop(self) -> None:
        """Take nothing more in; what is being placed is finished by `run`'s tasks."""
        for loop in self._loops.values():
            await loop.stop()

    def arrived(self, request_id: str, attempt: int) -> None:
        """A placed job has reached the worker's own consumer: its slot is now counted by the run."""
        self._placed.pop((request_id, attempt), None)

    @property
    def room(self) -> int:
        return self._free_slots() - len(self._placed)

    def balance(self) -> None:
        """Ask for messages of each class while there is room; called whenever a slot or a permission changes.

        When only the room shrinks, open requests stay open: withdrawing them costs more than giving back what they may bring.
        """
        allowed = self._may_place()
        wanted = max(0, min(self.room, self._burst)) if allowed else 0
        for loop in self._loops.values():
            if loop.credit < wanted or (loop.credit and not allowed):
                loop.add_credit(wanted - loop.credit)

    def _on_request(self, delivery: Delivery, request_class: RequestClass) -> None:
        try:
            envelope = decode(Envelope, delivery.data)
            attempt, history = parse_job_headers(delivery.headers)
        except WireError as error:
            metrics.MALFORMED.labels("request").inc()
            log.error("request.malformed", subject=delivery.subject, seq=delivery.stream_seq, error=str(error))
            dead_letter(self._messaging, self._subjects, self._pool, delivery, str(error), wall=self._wall)
            self.balance()
            return
        if envelope.id in self._tombstones:
            delivery.ack()
        elif self._tasks is not None and self._may_place() and (worker := self._elsewhere(envelope)):
            self._tasks.create_task(self._place(delivery, envelope, attempt, history, worker=worker))
        elif self._tasks is None or self.room < 1 or not self._may_place():
            delivery.nak()  # several classes answered at once and the slot is taken: somebody else may have one
        else:
            self._placed[envelope.id, attempt] = self._loop.time()
            self._tasks.create_task(self._place(delivery, envelope, attempt, history, worker=self._worker))
        self.balance()

    async def _place(
        self, delivery: Delivery, envelope: Envelope, attempt: int, history: list[HistoryEntry], *, worker: str
    ) -> None:
        self._holding[delivery] = None
        try:
            while True:
                try:
                    ack = await self._messaging.publish(
                        self._subjects.work(self._pool, worker),
                        delivery.data,
                        headers=job_headers(attempt, history),
                        msg_id=f"{envelope.id}.{attempt}@{delivery.stream_seq}",
                        ttl_s=message_ttl_s(envelope.deadline, self._wall(), self._timing.ttl_slack_s),
                        timeout_s=self._timing.publish_timeout_s,
                    )
                except QueueFull:
                    self._placed.pop((envelope.id, attempt), None)
                    delivery.nak(self._timing.retry_s)
                    return
                except JetStreamError as error:  # unknown outcome: the same subject and id until it is known
                    log.warning("place.retry", request_id=envelope.id, attempt=attempt, error=str(error))
                    await asyncio.sleep(self._timing.retry_s)
                else:
                    break
            if ack.duplicate:
                self._placed.pop((envelope.id, attempt), None)
            else:
                metrics.PLACED.inc()
                if worker == self._worker:
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
            now = asyncio.get_running_loop().time()
            for key, since_s in list(self._placed.items()):
                if now - since_s > PLACED_FORGOTTEN_S:
                    del self._placed[key]
            self.balance()
