"""Keeps the stored jobs that a carrier holds: each by its stored sequence, with the handle of its latest delivery."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

import structlog

from headrace.broker.durable.quota import JobNotices
from headrace.broker.durable.results import OutsideEnds, ResultStore
from headrace.broker.durable.stored_job import CarriedBatches, JobRenderer, RenderedJob, StoredJob
from headrace.broker.durable.stream_writer import DurableStreamWriter, JobState
from headrace.broker.errors import WireError
from headrace.broker.ingress.ingress import Ingress
from headrace.broker.messages.durable import JobStatus
from headrace.broker.settings import CarrierSettings
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Delivery, Messaging
from headrace.jetstream.subjects import Subjects

T = TypeVar("T")
log = structlog.get_logger()

LONGEST_RETRY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CarrierDeps:
    """Connection, judge and stores of one carrier. `wall` gives Unix time; `batches` is None if batches are off."""

    messaging: Messaging
    subjects: Subjects
    ingress: Ingress
    renderer: JobRenderer
    batches: CarriedBatches | None
    results: ResultStore
    ends: OutsideEnds
    notices: JobNotices
    settings: CarrierSettings
    wall: Callable[[], float]


async def known(read: Callable[[], Awaitable[T]], *, what: str, retry_s: float) -> T:
    """Return what `read` returns, however often it has to be tried. Cancel it to give up."""
    while True:
        try:
            return await read()
        except (JetStreamError, WireError) as error:
            log.debug("job.unread", what=what, error=str(error))
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * 2, LONGEST_RETRY_S)


Stop = JobStatus | Literal["", "seen", "lost"]
Phase = Literal["waiting", "starting", "running"]


class HeldJob:
    """A job that is carried here. `stop` is set once: how it has to end, `seen` if it has, `lost` if another one has it."""

    def __init__(
        self, job: StoredJob, slug: str, delivery: Delivery, messaging: Messaging, subjects: Subjects, *, nonce: str
    ) -> None:
        self.job = job
        self.ref = job.ref
        self.slug = slug
        self.seq = delivery.stream_seq
        self.delivery = delivery
        self.num_delivered = delivery.num_delivered
        self.nonce = nonce
        self._messaging = messaging
        self._subjects = subjects
        self.stored = JobState()
        self.noted = False  # this delivery has written a take
        self.phase: Phase = "waiting"
        self.stop: Stop = ""
        self.wake = asyncio.Event()
        self.on_wake: Callable[[], None] | None = None  # has the job's loop look, where that does not wait for `wake`
        self.rendered: RenderedJob | None = None
        self.task: asyncio.Task[None] | None = None

    @cached_property
    def writer(self) -> DurableStreamWriter:
        """The writer of this delivery's entries: of a plain job that is delivered once there are none."""
        return DurableStreamWriter(self._messaging, self._subjects, self.job.tenant, self.job.token, nonce=self.nonce)

    @property
    def ordered_end(self) -> JobStatus | None:
        """The end that was ordered, None while the job goes on or is another carrier's."""
        stop = self.stop
        return None if stop == "" or stop == "seen" or stop == "lost" else stop

    def halt(self, how: Stop) -> None:
        """End what is being done for this job. The first call counts."""
        if not self.stop:
            self.stop = how
            self.rouse()

    def rouse(self) -> None:
        self.wake.set()
        if self.on_wake is not None:
            self.on_wake()


def has_precedence(held: HeldJob, nonce: str) -> bool:
    """Decide whether a held job goes before another copy of it, whose delivery is `nonce` and which is not running yet.

    Of two that are being checked at the same time one must go on, or each would leave the job to the other. Without a nonce the
    question is whether it is held at all.
    """
    if not nonce or held.phase == "running":
        return held.nonce != nonce
    return held.phase == "starting" and held.nonce > nonce


class HeldJobs:
    def __init__(self) -> None:
        self._by_seq: dict[int, HeldJob] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_seq)

    def __contains__(self, seq: int) -> bool:
        return seq in self._by_seq

    def __iter__(self) -> Iterator[HeldJob]:
        return iter(list(self._by_seq.values()))

    def redelivered(self, delivery: Delivery) -> bool:
        """Replace the ack handle if this stored message is held here already. False if it is not."""
        held = self._by_seq.get(delivery.stream_seq)
        if held is None or held.delivery.data != delivery.data:
            return False
        held.delivery = delivery
        return True

    def add(self, held: HeldJob) -> HeldJob | None:
        """Hold a job. Returns the one that had its sequence, if the stream was deleted and made again."""
        displaced = self._by_seq.get(held.seq)
        if displaced is not None:
            self.remove(displaced)
        self._by_seq[held.seq] = held
        self._counts[held.slug] += 1
        return displaced

    def remove(self, held: HeldJob) -> None:
        """Forget a job. One that was forgotten is fine."""
        if self._by_seq.get(held.seq) is held:
            del self._by_seq[held.seq]
            self._counts[held.slug] -= 1

    def of(self, job: str) -> list[HeldJob]:
        return [held for held in self._by_seq.values() if held.job.id == job]

    def phases(self) -> dict[Phase, int]:
        found: dict[Phase, int] = {"waiting": 0, "starting": 0, "running": 0}
        for held in self._by_seq.values():
            found[held.phase] += 1
        return found

    def count(self, slug: str) -> int:
        return self._counts[slug]
