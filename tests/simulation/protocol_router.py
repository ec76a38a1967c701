"""A router as the protocol sees it: it pulls requests, sheds some, places the rest and moves what has no owner."""

from __future__ import annotations

import asyncio

from broker.codec import decode, encode, job_headers, parse_job_headers
from broker.members import Members
from broker.messages import Cancel, Envelope, JobFault, Refuse, RefuseReply, RouterMember
from broker.moving import Janitor, Mover, message_ttl_s
from broker.settings import Timing
from jetstream.errors import JetStreamError, NoResponder, NotConnected, QueueFull, RequestTimeout
from jetstream.lease import LeaseKeeper
from jetstream.ports import Delivery, Message
from jetstream.subjects import REQUEST_CLASSES, Subjects
from jetstream.topology import request_consumer
from tests.simulation.world import Machine

WINDOW = 100


class SimRouter:
    """One router process of one pool."""

    def __init__(self, machine: Machine, subjects: Subjects, pool: str, *, timing: Timing, shed: float) -> None:
        self.machine = machine
        self.messaging = machine.messaging
        self.subjects = subjects
        self.pool = pool
        self.timing = timing
        self.shed = shed
        self.cancelled: set[str] = set()
        self.held: dict[Delivery, None] = {}
        self.members = Members(self.messaging, subjects, lease_ttl_s=timing.lease_ttl_s)
        value = encode(RouterMember(router=machine.id, pool=pool))
        key = subjects.router_key(pool, machine.id)
        bucket = subjects.bucket("members")
        self.lease = LeaseKeeper(self.messaging, bucket, key, value, ttl_s=timing.lease_ttl_s, on_lapse=lambda: None)
        mover = Mover(self.messaging, subjects, pool=pool, timing=timing, wall=machine.wall)
        self.janitor = Janitor(self.messaging, subjects, self.members, mover, pool=pool, timing=timing)

    async def run(self) -> None:
        await self.messaging.subscribe(self.subjects.cancel(self.pool), self._on_cancel)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.lease.run())
            tasks.create_task(self.members.run())
            tasks.create_task(self.janitor.run(lambda: self.lease.held))
            tasks.create_task(self._hold())
            await self.lease.wait_held(60.0)
            for request_class in REQUEST_CLASSES:
                spec = request_consumer(self.subjects, self.pool, request_class)
                loop = self.messaging.pull(
                    spec.stream,
                    spec.name,
                    lambda delivery: tasks.create_task(self._handle(delivery)),
                    credit=WINDOW,
                    priority=0,
                    on_missing=lambda spec=spec: self.messaging.ensure_consumer(spec),  # type: ignore[misc]
                )
                tasks.create_task(loop.run())

    def _on_cancel(self, message: Message) -> None:
        self.cancelled.update(decode(Cancel, message.data).ids)

    async def _hold(self) -> None:
        while True:
            await asyncio.sleep(self.timing.ack_wait_s / 3)
            for delivery in self.held:
                delivery.progress()

    async def _handle(self, delivery: Delivery) -> None:
        self.held[delivery] = None
        envelope = decode(Envelope, delivery.data)
        attempt, history = parse_job_headers(delivery.headers)
        if envelope.id in self.cancelled:
            delivery.ack()
        elif attempt == 1 and self.machine.rng.random() < self.shed:  # never what may have given tokens already
            await self._refuse(delivery, envelope, attempt)
        else:
            await self._place(delivery, envelope, attempt, job_headers(attempt, history))
        self.held.pop(delivery, None)

    async def _place(self, delivery: Delivery, envelope: Envelope, attempt: int, headers: dict[str, str]) -> None:
        target = ""
        while True:
            ready = [member.worker for member in self.members.ready_workers(self.pool)]
            if not target and not ready:
                await asyncio.sleep(self.timing.retry_s)
                continue
            target = target or self.machine.rng.choice(ready)
            try:
                await self.messaging.publish(
                    self.subjects.work(self.pool, target),
                    delivery.data,
                    headers=headers,
                    msg_id=f"{envelope.id}.{attempt}@{delivery.stream_seq}",
                    ttl_s=message_ttl_s(envelope.deadline, self.machine.wall(), self.timing.ttl_slack_s),
                )
            except QueueFull:
                target = ""
                await asyncio.sleep(self.timing.retry_s)
            except JetStreamError:  # unknown: the same worker again
                await asyncio.sleep(self.timing.retry_s)
            else:
                delivery.ack()
                return

    async def _refuse(self, delivery: Delivery, envelope: Envelope, attempt: int) -> None:
        fault = JobFault("shed", "no room", retriable=True, retry_after_s=1.0)
        question = encode(Refuse(id=envelope.id, attempt=attempt, fault=fault))
        while True:
            try:
                decode(
                    RefuseReply, await self.messaging.request(self.subjects.control(envelope.judge), question, timeout_s=1.0)
                )
                break
            except (NoResponder, RequestTimeout, NotConnected):
                if await self.members.ingress_gone(envelope.judge):
                    break
                await asyncio.sleep(self.timing.retry_s)
        delivery.ack()
