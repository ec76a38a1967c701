"""Intake of stored jobs: pulls as many for each model as its pools can use soon, and checks them before they run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Literal
from zlib import crc32

import structlog

from headrace.broker.codec import decode, encode
from headrace.broker.dead_letters import MOST_BYTES, note_failure
from headrace.broker.durable import metrics
from headrace.broker.durable.errors import CarrierLost, JobMalformed, StreamIncomplete
from headrace.broker.durable.held_job import CarrierDeps, HeldJob, HeldJobs, has_precedence, known
from headrace.broker.durable.job_end import JobEnder
from headrace.broker.durable.names import LONGEST_NAME, JobRef
from headrace.broker.durable.results import ResultLookup, without_answer
from headrace.broker.durable.stored_job import name_of, parse_job
from headrace.broker.durable.stream_writer import asks_carriers, has_entries, is_carrier_poison, is_left_to, read_stream, window
from headrace.broker.errors import WireError
from headrace.broker.membership.members import drained_key
from headrace.broker.messages.control import Carrying, Done
from headrace.broker.messages.durable import HEADER_BATCH, HEADER_CUSTOM_ID, HEADER_STREAM, JobStatus, Unreadable
from headrace.broker.messages.frames import JobFault
from headrace.jetstream.errors import JetStreamError, NoResponder, SubjectError
from headrace.jetstream.ports import Delivery, Messaging, PullLoop, StoredMessage
from headrace.jetstream.subjects import slug
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import job_consumer

RANKS = {"hi": 0, "std": 1, "batch": 2}


class WaitingJobs:
    def __init__(self) -> None:
        self._by_seq: dict[int, HeldJob] = {}
        self._queues: dict[tuple[int, str], list[tuple[float, int, int, HeldJob]]] = {}  # with jobs that were removed, too
        self._added = count()  # jobs of one sequence, of which one was removed, are not compared

    def __len__(self) -> int:
        return len(self._by_seq)

    def add(self, held: HeldJob) -> None:
        self._by_seq[held.seq] = held
        queue = self._queues.setdefault((RANKS[held.job.request_class], held.job.tenant), [])
        heappush(queue, (held.job.deadline, held.seq, next(self._added), held))

    def remove(self, held: HeldJob) -> None:
        if self._by_seq.get(held.seq) is held:
            del self._by_seq[held.seq]
        if not self._by_seq:
            self._queues.clear()

    def take(self, started: Mapping[str, int]) -> HeldJob | None:
        """Take the job to start next, None if none waits. `started`: each tenant's jobs that have started and not ended."""
        best: tuple[int, int, float, int] | None = None
        chosen: HeldJob | None = None
        for (rank, tenant), queue in list(self._queues.items()):
            held = self._first(queue)
            if held is None:
                del self._queues[rank, tenant]
            elif best is None or (rank, started.get(tenant, 0), held.job.deadline, held.seq) < best:
                best, chosen = (rank, started.get(tenant, 0), held.job.deadline, held.seq), held
        if chosen is not None:
            self.remove(chosen)
        return chosen

    def _first(self, queue: list[tuple[float, int, int, HeldJob]]) -> HeldJob | None:
        while queue:
            held = queue[0][3]
            if self._by_seq.get(held.seq) is held:
                return held
            heappop(queue)
        return None


# Ends stored messages that are no jobs: with a result that says why, and a dead letter, never by redelivery without end.

log = structlog.get_logger()

UNKNOWN_POOL = "unknown"  # the subject of dead letters of jobs whose subject cannot be read


class MalformedJobs:
    def __init__(self, deps: CarrierDeps, ender: JobEnder, tasks: TaskScope) -> None:
        self._deps = deps
        self._ender = ender
        self._tasks = tasks
        self._ending: set[int] = set()  # stored sequences

    def end(self, delivery: Delivery, why: str) -> None:
        seq = delivery.stream_seq
        if seq not in self._ending:
            self._ending.add(seq)
            self._tasks.spawn_guarded(self._end(delivery, why), lambda error: self._not_ended(delivery, error))

    def _not_ended(self, delivery: Delivery, error: Exception) -> None:
        """Leave a message whose end fails to its redelivery, which is slow."""
        self._ending.discard(delivery.stream_seq)
        note_failure("job", error, seq=delivery.stream_seq)

    async def _end(self, delivery: Delivery, why: str) -> None:
        try:
            tenant = self._deps.subjects.parse_job(delivery.subject).tenant
        except SubjectError as error:  # no result can be stored for it
            letter = Unreadable(subject=delivery.subject, why=why, data=bytes(delivery.data[:MOST_BYTES]), at=self._deps.wall())
            self._deps.messaging.send(self._deps.subjects.dlq(UNKNOWN_POOL), encode(letter))
            log.error("job.malformed", seq=delivery.stream_seq, error=str(error)[:300])
            delivery.ack()
            return
        job = job_ref(delivery, tenant)
        log.error("job.malformed", stored_job=job.id, tenant=job.tenant, seq=delivery.stream_seq, error=why)
        try:
            result = without_answer(job, "malformed", self._deps.wall(), why)
            await self._deps.ends.end(job, result, JobFault("malformed", why))
            await self._ender.dead_letter(job, delivery, why)
            delivery.ack()
            self._deps.notices.finished(job, result)
        except StreamIncomplete as error:
            log.error("stream.incomplete", stored_job=job.id, tenant=job.tenant, error=str(error))
        finally:
            self._ending.discard(delivery.stream_seq)


def job_ref(delivery: Delivery, tenant: str) -> JobRef:
    """Return the names in a message, as far as they can be read."""
    headers = delivery.headers
    name = name_of(headers, delivery.stream_seq)[:LONGEST_NAME]
    return JobRef(
        tenant=tenant,
        name=name,
        durable=headers.get(HEADER_STREAM) == "1",
        batch=headers.get(HEADER_BATCH, ""),
        custom_id=headers.get(HEADER_CUSTOM_ID, ""),
    )


ENSURE_RETRY_S = 1.0

OnDelivery = Callable[[str, Delivery], None]
"""Takes a delivery of a job of a model, which is given by its slug."""


def slug_of_pool(pool: str) -> str:
    return pool.rpartition("-")[0]


class JobIntake:
    def __init__(self, deps: CarrierDeps, held: HeldJobs, tasks: TaskScope, on_delivery: OnDelivery) -> None:
        self._deps = deps
        self._held = held
        self._tasks = tasks
        self._on_delivery = on_delivery
        self._pulls: dict[str, PullLoop] = {}
        self._stopped = True
        self._pause_end: asyncio.TimerHandle | None = None  # None = there is no pause
        self._due = False
        self._capacity: dict[str, int] | None = None  # slots by slug; None = something has changed since they were counted
        self._loop = asyncio.get_running_loop()
        deps.ingress.members.on_change(self._on_change)
        deps.ingress.models.on_change(self._on_change)

    def has_capacity(self, model: str) -> bool:
        if self._capacity is None:
            self._capacity = self._count_slots()
        return model in self._capacity

    def models(self) -> list[str]:
        """Return the slugs of the models whose jobs are pulled."""
        return list(self._pulls)

    def pause(self) -> None:
        """Take no more jobs for a moment, because the queue is full or the broker refuses."""
        if self._pause_end is not None:
            self._pause_end.cancel()
        self._pause_end = self._loop.call_later(self._deps.settings.retry_s, self._go_on)
        self.balance()

    def _go_on(self) -> None:
        """End the pause. The clock is not asked: a timer may be a moment early by it, and nothing else may ever come."""
        self._pause_end = None
        self.balance()

    def start(self) -> None:
        self._stopped = False
        self.balance()

    def stop(self) -> None:
        self._stopped = True
        self.balance()

    def _on_change(self) -> None:
        self._capacity = None
        self.balance()

    def balance(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._balance)

    def _balance(self) -> None:
        self._due = False
        if self._capacity is None:
            self._capacity = self._count_slots()
        slots = self._capacity if not self._stopped else {}
        for model in slots:
            if model not in self._pulls:
                self._open(model)
        ingress = self._deps.ingress
        allowed = ingress.lease_held and not self._stopped and self._pause_end is None
        carriers = max(1, len(ingress.members.ingresses()))
        for model, loop in self._pulls.items():
            most = window(slots.get(model, 0), carriers, self._deps.settings.window) if allowed else 0
            wanted = max(0, most - self._held.count(model))
            if loop.credit != wanted:
                loop.add_credit(wanted - loop.credit)

    def _count_slots(self) -> dict[str, int]:
        members, models = self._deps.ingress.members, self._deps.ingress.models
        slots = {pool: sum(max(1, member.slots) for member in members.serving_workers(pool)) for pool in members.pools()}
        pools: dict[str, set[str]] = {}
        for pool in slots:
            pools.setdefault(slug_of_pool(pool), set()).add(pool)
        for name in models.listed_names():
            if (pool_of := models.pool_of(name)) is not None:
                pools.setdefault(slug(name), set()).add(pool_of)
        found = {model: sum(slots.get(pool, 0) for pool in behind) for model, behind in pools.items()}
        return {model: n for model, n in found.items() if n and self._deps.renderer.serves(model)}

    def _open(self, model: str) -> None:
        spec = job_consumer(self._deps.subjects, model)
        messaging = self._deps.messaging

        async def ensure() -> None:
            await messaging.ensure_consumer(spec)

        loop = messaging.pull(spec.stream, spec.name, lambda delivery: self._on_delivery(model, delivery), on_missing=ensure)
        self._pulls[model] = loop
        self._tasks.spawn(self._run(model, loop))

    async def _run(self, model: str, loop: PullLoop) -> None:
        spec = job_consumer(self._deps.subjects, model)
        while True:
            try:
                await self._deps.messaging.ensure_consumer(spec)
                break
            except JetStreamError as error:
                log.warning("consumer.not_made", consumer=spec.name, error=str(error))
                await asyncio.sleep(ENSURE_RETRY_S)
        await loop.run()


Admitted = Literal["submit", "ended", "left"]


class JobAdmission:
    """Checks jobs in the order that `docs/reliability.md` gives, and takes them."""

    def __init__(self, deps: CarrierDeps, held: HeldJobs, ender: JobEnder, lookup: ResultLookup) -> None:
        self._deps = deps
        self._held = held
        self._ender = ender
        self._lookup = lookup
        self._records = deps.messaging.bucket(deps.subjects.bucket("state"))
        self._retry_s = deps.settings.timing.retry_s

    async def admit(self, held: HeldJob) -> Admitted:
        """Return `submit` if the job is this carrier's to run, `ended` once its result was seen, `left` if another has it."""
        job = held.job
        result = await known(lambda: self._lookup.get(job.tenant, job.token), what="result", retry_s=self._retry_s)
        if result is not None:
            self._ender.settle(held, result)
            return "ended"
        entries = has_entries(job, held.num_delivered)
        while True:
            if entries:
                held.stored = await known(
                    lambda: read_stream(self._deps.messaging, self._deps.subjects, job.tenant, job.token),
                    what="stream",
                    retry_s=self._retry_s,
                )
                held.writer.continue_from(held.stored)
                if held.stored.end is not None:
                    await self._ender.commit_from_stream(held)
                    return "ended"
            if (status := self._over(held)) is not None:
                return await self._end(held, status)
            if asks_carriers(held.num_delivered, held.stored) and await self._carried_elsewhere(held):
                metrics.LEFT.labels("carried").inc()
                return "left"
            if await self._is_poison(held):
                return await self._poison(held)
            if not entries or await self._take(held):
                return "submit"
            await asyncio.sleep(self._retry_s)

    async def _end(self, held: HeldJob, status: JobStatus, fault: JobFault | None = None) -> Admitted:
        return "ended" if await self._ender.end(held, status, fault=fault) else "left"

    def _over(self, held: HeldJob) -> JobStatus | None:
        if held.ordered_end is not None:
            return held.ordered_end
        if self._deps.wall() >= held.job.deadline:
            return "expired"
        batches, batch = self._deps.batches, held.job.batch
        return batches.closing(batch) if batch and batches is not None else None

    async def _take(self, held: HeldJob) -> bool:
        """Set the fence. False if another carrier has written meanwhile."""
        try:
            await held.writer.append("take", carrier=self._deps.ingress.id)
        except CarrierLost:
            return False
        held.noted = True
        return True

    # Other carriers:

    async def _carried_elsewhere(self, held: HeldJob) -> bool:
        ingress = self._deps.ingress
        if any(has_precedence(other, held.nonce) for other in self._held.of(held.job.id)):
            return True
        ask = partial(is_carried, self._deps, job=held.job.id, nonce=held.nonce)
        taker = held.stored.takes[-1].carrier if held.stored.takes else ingress.id
        others = [other for other in ingress.members.ingresses() if other not in (ingress.id, taker)]
        asked = [ask(other) for other in others]
        if taker == ingress.id:
            return is_left_to(False, await asyncio.gather(*asked), taker_gone=False)
        answer, *answers = await asyncio.gather(ask(taker), *asked)
        gone = answer is None and await ingress.judge_gone(taker)
        return is_left_to(answer, answers, taker_gone=gone)

    # Poison:

    async def _is_poison(self, held: HeldJob) -> bool:
        takers = {take.carrier for take in held.stored.unbegun()}
        dead = {taker for taker in takers if await self._has_died(taker)}
        return is_carrier_poison(held.stored, dead)

    async def _has_died(self, taker: str) -> bool:
        """Read whether a carrier is gone without having announced a drain."""
        if not await self._deps.ingress.judge_gone(taker):
            return False
        drained = await known(lambda: self._records.get(drained_key(taker)), what="drain", retry_s=self._retry_s)
        return drained is None

    async def _poison(self, held: HeldJob) -> Admitted:
        carriers = len({take.carrier for take in held.stored.unbegun()})
        message = f"{carriers} frontends died while they prepared this job"
        log.error("job.poisoned", stored_job=held.job.id, tenant=held.job.tenant, carriers=carriers)
        await self._ender.dead_letter(held.ref, held.delivery, message)
        return await self._end(held, "poison", JobFault("poison", message))


async def is_carried(deps: CarrierDeps, ingress: str, job: str, nonce: str = "") -> bool | None:
    """Ask another ingress whether it carries a job; None if it does not answer. Without the nonce of a delivery: holds it."""
    question = encode(Carrying(job=job, nonce=nonce))
    timeout_s = deps.settings.timing.rpc_timeout_s
    try:
        return decode(Done, await deps.messaging.request(deps.subjects.judge(ingress), question, timeout_s=timeout_s)).ok
    except (NoResponder, JetStreamError, WireError):
        return None


# Takes over the stored jobs of an ingress that is gone, before their ack wait is over.
#
# Nothing stored names the holder of a job that was delivered once, so the others are asked. Each carrier looks at its share of
# what waits for an ack. A job that no carrier holds is carried as one that was delivered again; its redelivery finds it so.

ORPHANS_PER_READ = 200
ARRIVING_S = 0.1  # for deliveries that are on their way to the others while it is read what waits for an ack


class Orphans:
    def __init__(
        self, deps: CarrierDeps, held: HeldJobs, tasks: TaskScope, models: Callable[[], Iterable[str]], take: OnDelivery
    ) -> None:
        """`models`: those whose jobs are pulled here."""
        self._deps = deps
        self._held = held
        self._tasks = tasks
        self._models = models
        self._take = take
        self._known = frozenset[str]()
        deps.ingress.members.on_change(self._on_change)

    def _on_change(self) -> None:
        before, self._known = self._known, frozenset(self._deps.ingress.members.ingresses())
        for gone in before - self._known - {self._deps.ingress.id}:
            with contextlib.suppress(RuntimeError):  # this carrier does not run yet, or ends
                self._tasks.spawn_guarded(self.adopt(gone), lambda error: note_failure("orphan", error))

    async def adopt(self, gone: str) -> None:
        """Take over this carrier's share of the jobs that no carrier holds, once `gone` is known to be dead."""
        ingress = self._deps.ingress
        if not ingress.lease_held or not await ingress.judge_gone(gone):
            return
        for model in self._models():
            try:
                if adopted := await self._adopt_of(model):
                    log.warning("jobs.adopted", gone=gone, model=model, jobs=adopted)
            except JetStreamError as error:  # their ack wait does it
                log.info("jobs.not_adopted", gone=gone, model=model, error=str(error))

    async def _adopt_of(self, model: str) -> int:
        spec, messaging = job_consumer(self._deps.subjects, model), self._deps.messaging
        out = await messaging.unacked(spec.stream, spec.name)
        if not out.messages:
            return 0
        await asyncio.sleep(ARRIVING_S)
        adopted, seq = 0, out.floor
        while seq < out.last:
            page = await messaging.subject_messages(
                spec.stream, spec.filter_subjects[0], limit=ORPHANS_PER_READ, start_seq=seq + 1
            )
            found = [message for message in page if message.seq <= out.last]
            for message, orphan in zip(found, await asyncio.gather(*map(self._is_orphan, found)), strict=True):
                if orphan and message.seq not in self._held:
                    self._take(model, AdoptedJob(message, self._deps.messaging, spec.stream, self._tasks))
                    metrics.ADOPTED.inc()
                    adopted += 1
            if len(found) < ORPHANS_PER_READ:
                break
            seq = found[-1].seq
        return adopted

    async def _is_orphan(self, message: StoredMessage) -> bool:
        """Return whether a job is of this carrier's share and held by none. One that cannot be read stays where it is."""
        ingress = self._deps.ingress
        others = [other for other in ingress.members.ingresses() if other != ingress.id]
        if message.seq in self._held or any(_share(other, message.seq) < _share(ingress.id, message.seq) for other in others):
            return False
        try:
            tenant = self._deps.subjects.parse_job(message.subject).tenant
            headers = message.headers or {}
            job = parse_job(message.data, headers, tenant=tenant, seq=message.seq, stored=message.at)
        except (JobMalformed, SubjectError):
            return False
        answers = await asyncio.gather(*[is_carried(self._deps, other, job.id) for other in others])
        return all(answer is False for answer in answers)


def _share(ingress: str, seq: int) -> int:
    return crc32(f"{ingress}.{seq}".encode())


class AdoptedJob:
    """A stored job that this carrier has taken without a delivery; a `Delivery` in all other respects.

    Its ack removes it. It cannot be extended: it is delivered again, and then held by that delivery.
    """

    num_delivered = 2  # at least: it has been with another carrier
    pending = 0

    def __init__(self, message: StoredMessage, messaging: Messaging, stream: str, tasks: TaskScope) -> None:
        self.subject, self.stream_seq, self.data = message.subject, message.seq, message.data
        self.headers, self.stored = message.headers or {}, message.at
        self._messaging = messaging
        self._stream = stream
        self._tasks = tasks

    def ack(self) -> None:
        self._tasks.spawn_guarded(self._remove(), lambda error: note_failure("orphan", error, seq=self.stream_seq))

    async def _remove(self) -> None:
        with contextlib.suppress(JetStreamError):  # its redelivery finds the result
            await self._messaging.delete_message(self._stream, self.stream_seq)

    def nak(self, delay_s: float = 0.0) -> None:
        """Do nothing: it comes to another carrier when its ack wait is over."""

    def progress(self) -> None:
        """Do nothing: see above."""

    def term(self, reason: str = "") -> None:
        self.ack()
