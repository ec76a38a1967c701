"""What a scenario runs in: two connections to one server, and a topology with caps of 2 messages per subject in REQ."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from headrace.jetstream.ports import ConsumerSpec, Delivery, Message, Messaging, PullLoop
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology

ACK_WAIT_S = 0.8
POOL = "m-00000000"


@dataclass
class Bed:
    """Two connections to one server that holds `topology`."""

    a: Messaging
    b: Messaging
    subjects: Subjects
    group: asyncio.TaskGroup
    pulls: list[PullLoop] = field(default_factory=list)

    @property
    def work(self) -> str:
        return self.subjects.stream("WORK")

    def subject(self, worker: str = "w1") -> str:
        return self.subjects.work(POOL, worker)

    async def consumer(self, *, name: str = "C", worker: str = "w1", **options: object) -> str:
        await self.a.ensure_consumer(
            ConsumerSpec(
                stream=self.work,
                name=name,
                filter_subjects=(self.subject(worker),),
                **{"ack_wait_s": ACK_WAIT_S, **options},  # type: ignore[arg-type]
            )
        )
        return name

    def reader(self, messaging: Messaging, consumer: str = "C", *, credit: int = 10, priority: int | None = None) -> Readings:
        """Start pulling; everything that comes is kept."""
        readings = Readings()
        readings.loop = messaging.pull(self.work, consumer, readings.take, credit=credit, priority=priority)
        self.pulls.append(readings.loop)
        self.group.create_task(readings.loop.run())
        return readings


class Readings:
    """What one pull loop was given."""

    loop: PullLoop

    def __init__(self) -> None:
        self.got: list[Delivery] = []
        self._more = asyncio.Event()

    def take(self, delivery: Delivery) -> None:
        self.got.append(delivery)
        self._more.set()

    async def wait(self, n: int, timeout_s: float = 5.0) -> list[Delivery]:
        async with asyncio.timeout(timeout_s):
            while len(self.got) < n:
                self._more.clear()
                await self._more.wait()
        return self.got


def note(seen: list[str], name: str, _message: Message) -> None:
    seen.append(name)


async def until_gone(read: Callable[[], Awaitable[object]], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while await read() is not None:
            await asyncio.sleep(0.02)


def topology(subjects: Subjects) -> Topology:
    mib = 1024 * 1024
    return Topology(
        subjects=subjects,
        tenant_cap=2,
        request_bytes=mib,
        work_bytes=mib,
        job_bytes=mib,
        result_bytes=mib,
        rsp_bytes=mib,
        kv_bytes=mib,
        worker_cap=100,
    )


async def run(scenario: Callable[[Bed], Awaitable[None]], a: Messaging, b: Messaging, subjects: Subjects) -> None:
    async with asyncio.TaskGroup() as group:
        bed = Bed(a, b, subjects, group)
        await scenario(bed)
        for pull in bed.pulls:
            await pull.stop()
