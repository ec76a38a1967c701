"""The job runner of an ingress: pulls stored jobs, checks, runs and ends them while the ingress holds its lease."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial

import structlog

from headrace.broker.codec import decode
from headrace.broker.dead_letters import note_failure, until_done
from headrace.broker.durable import metrics
from headrace.broker.durable.errors import JobMalformed, StreamIncomplete
from headrace.broker.durable.held_job import CarrierDeps, HeldJob, HeldJobs, has_precedence
from headrace.broker.durable.intake import JobAdmission, JobIntake, MalformedJobs, Orphans, WaitingJobs
from headrace.broker.durable.job_end import JobEnder
from headrace.broker.durable.job_run import JobRunner
from headrace.broker.durable.names import Nonces
from headrace.broker.durable.quota import JobNotices
from headrace.broker.durable.results import TEXTS, OutsideEnds, ResultLookup, ResultStore, refused, without_answer
from headrace.broker.durable.stored_job import CarriedBatches, JobRenderer, StoredJob, parse_job
from headrace.broker.errors import WireError
from headrace.broker.ingress.ingress import Ingress
from headrace.broker.membership.members import drained_key
from headrace.broker.messages.durable import JobResult, StreamEntry
from headrace.broker.messages.events import Cancel
from headrace.broker.messages.frames import JobFault
from headrace.broker.settings import CarrierSettings
from headrace.jetstream.errors import JetStreamError, SubjectError
from headrace.jetstream.ports import Delivery, Message, Messaging, StoredMessage
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import JOB_ACK_WAIT_S, LONGEST_DEADLINE_S

log = structlog.get_logger()

TICK_S = 0.5
EXTEND_S = JOB_ACK_WAIT_S / 3


class JobWatch:
    def __init__(self, deps: CarrierDeps, held: HeldJobs) -> None:
        self._deps = deps
        self._held = held

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            tasks.create_task(self._extend())
            tasks.create_task(self._poll())

    def on_cancel(self, message: Message) -> None:
        try:
            ids = set(decode(Cancel, message.data).ids)
        except WireError as error:
            log.error("cancel.malformed", error=str(error))
            return
        for held in self._held:
            if held.job.id in ids:
                held.halt("cancelled")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = self._deps.wall()
            for held in self._held:
                if now >= held.job.deadline:
                    held.halt("expired")
            self._look_at_batches()

    async def _extend(self) -> None:
        while True:
            await asyncio.sleep(EXTEND_S)
            for phase, number in self._held.phases().items():
                metrics.CARRIED.labels(phase).set(number)
            if self._deps.ingress.lease_held:
                for held in self._held:
                    held.delivery.progress()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._deps.settings.poll_s)
            try:
                await self.look()
            except (JetStreamError, WireError) as error:
                log.info("jobs.not_looked_at", error=str(error))
            except Exception as error:  # an entry that nothing foresaw must not end the frontend
                note_failure("entry", error)

    async def look(self) -> None:
        """Read the ends and the last entries of what is carried. Raises JetStreamError, WireError."""
        held_now = list(self._held)
        await self._look_at_results([held for held in held_now if not held.job.durable])
        await self._look_at_streams([held for held in held_now if held.job.durable])
        for held in held_now:
            if held.rendered is not None and not held.stop:
                self._deps.notices.step(held.ref, "progress", held.rendered.tokens.completion)

    async def _look_at_results(self, plain: list[HeldJob]) -> None:
        by_job = {(held.job.tenant, held.job.token): held for held in plain}
        if by_job:
            for key in await self._deps.results.get_all(list(by_job)):
                by_job[key].halt("seen")

    async def _look_at_streams(self, durable: list[HeldJob]) -> None:
        subjects = self._deps.subjects
        by_subject = {subjects.rsp(held.job.tenant, held.job.token): held for held in durable}
        if not by_subject:
            return
        for message in await self._deps.messaging.last_messages(subjects.stream("RSP"), list(by_subject)):
            held = by_subject[message.subject]
            try:
                entry = decode(StreamEntry, message.data)
            except WireError as error:  # its carrier ends a job whose entries cannot be read
                metrics.UNREADABLE_ENTRIES.inc()
                log.error("entry.malformed", stored_job=held.job.id, seq=message.seq, error=str(error))
                continue
            if message.seq > held.writer.last_seq and entry.nonce != held.nonce:
                held.halt("lost")

    def _look_at_batches(self) -> None:
        if self._deps.batches is None:
            return
        ends = {batch: self._deps.batches.closing(batch) for batch in {held.job.batch for held in self._held if held.job.batch}}
        for held in self._held:
            if (status := ends.get(held.job.batch)) is not None:
                held.halt(status)


# Sweeps the stored jobs that no carrier may ever take: overdue ones, and those of models that are not known.
#
# A pool without capacity has no carrier. A process that needs the end of one job may write it; the sweep does so for all jobs
# of such pools, slowly, and removes what has its result.

PAGE = 200  # jobs that are read at once
PAGES = 10  # of each subject in one sweep: a long queue is read in several
REST_S = 0.05  # between two pages, so that a long queue does not keep the event loop busy


def verdict(job: StoredJob, *, known: bool, now: float, margin_s: float, unknown_model_s: float) -> JobResult | None:
    """Return the result of a job that is to be ended from outside, None for one that may still be carried. Pure.

    `known`: its model has a card here. `now` is Unix time.
    """
    if now >= job.deadline + margin_s:
        return without_answer(job.ref, "expired", now)
    if not known and now >= job.created + unknown_model_s:
        message = "No model of this name is served here."
        return refused(job.ref, status_code=404, code="model_not_found", message=message, now=now)
    return None


class JobSweeper:
    def __init__(self, deps: CarrierDeps, carried: Callable[[str], bool]) -> None:
        """`carried(slug)`: there are workers for the jobs of this model, so that carriers reach all of them."""
        self._deps = deps
        self._carried = carried
        self._stream = deps.subjects.stream("JOB")
        self._cursors: dict[str, int] = {}  # by subject: the sequence at which the next sweep goes on

    async def run(self) -> None:
        """Sweep until cancelled. Several carriers sweep at different times; what one has ended the others find removed."""
        while True:
            await asyncio.sleep(self._deps.settings.sweep_s * (0.5 + random.random()))  # noqa: S311 - it spreads the load
            if self._deps.ingress.lease_held:
                try:
                    await self.sweep()
                except JetStreamError as error:
                    log.info("jobs.not_swept", error=str(error))

    async def sweep(self) -> None:
        subjects = self._deps.subjects
        counts = await self._deps.messaging.subject_counts(self._stream, subjects.all_jobs())
        for subject in sorted(counts):
            try:
                slug = subjects.parse_job(subject).model_slug
            except SubjectError as error:  # nothing reads there, and it must not keep the sweep from the others
                log.error("jobs.unknown_subject", error=str(error)[:300])
                continue
            if not self._carried(slug):
                await self._sweep_subject(subject)
        self._cursors = {subject: seq for subject, seq in self._cursors.items() if subject in counts}

    async def _sweep_subject(self, subject: str) -> None:
        for _ in range(PAGES):
            seq = self._cursors.get(subject, 1)
            page = await self._deps.messaging.subject_messages(self._stream, subject, limit=PAGE, start_seq=seq)
            for message in page:
                try:
                    await self._look(message)
                except JetStreamError:
                    raise
                except Exception as error:  # a job that nothing foresaw must not keep the sweep from the others
                    note_failure("sweep", error, seq=message.seq)
            if len(page) < PAGE:
                self._cursors.pop(subject, None)
                return
            self._cursors[subject] = page[-1].seq + 1
            await asyncio.sleep(REST_S)

    async def _look(self, message: StoredMessage) -> None:
        deps = self._deps
        subject = deps.subjects.parse_job(message.subject)
        try:
            job = parse_job(message.data, message.headers or {}, tenant=subject.tenant, seq=message.seq, stored=message.at)
        except JobMalformed:  # its carrier ends it
            return
        settings = deps.settings
        result = verdict(
            job,
            known=deps.renderer.serves(subject.model_slug),
            now=deps.wall(),
            margin_s=settings.margin_s,
            unknown_model_s=settings.unknown_model_s,
        )
        if result is None:
            return
        text = TEXTS["expired"] if result.status == "expired" else "no model of this name is served"
        fault = JobFault("deadline_exceeded" if result.status == "expired" else "model_not_found", text)
        try:
            status = await deps.ends.end(job.ref, result, fault)
        except StreamIncomplete as error:
            log.error("stream.incomplete", stored_job=job.id, tenant=job.tenant, error=str(error))
            return
        metrics.SWEPT.labels(status).inc()
        log.warning("job.swept", stored_job=job.id, tenant=job.tenant, status=status)
        stands = await deps.results.get(job.tenant, job.token)
        if stands is None and status == result.status == "failed":  # an earlier sweeper died here, and the model has no carrier
            stands = await deps.results.commit(job.tenant, job.token, result)
        if stands is not None:  # of a stream that had ended well its carrier makes the result
            await deps.messaging.delete_message(self._stream, message.seq)
            deps.notices.finished(job.ref, stands, job.reply)


MOST_FAILURES = 3  # deliveries of a job whose carrying fails unforeseen, before it ends
DRAIN_POLL_S = 0.05
KNOWN_SUBJECTS = 1024  # of jobs, whose tenants are remembered: all jobs of a tenant and a model share one


class Carrier:
    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        ingress: Ingress,
        renderer: JobRenderer,
        *,
        batches: CarriedBatches | None = None,
        settings: CarrierSettings | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        settings = settings or CarrierSettings()
        results = ResultStore(messaging, subjects, largest=settings.response_bytes)
        deps = CarrierDeps(
            messaging=messaging,
            subjects=subjects,
            ingress=ingress,
            renderer=renderer,
            batches=batches,
            results=results,
            ends=OutsideEnds(messaging, subjects, results, wall=wall),
            notices=JobNotices(messaging, subjects, carrier=ingress.id),
            settings=settings,
            wall=wall,
        )
        self._deps = deps
        self._tasks = TaskScope()
        self._held = HeldJobs()
        self._nonces = Nonces()
        self._tenant_of = lru_cache(KNOWN_SUBJECTS)(lambda subject: subjects.parse_job(subject).tenant)
        self._waiting = WaitingJobs()  # of the held ones
        self._started: Counter[str] = Counter()  # by tenant
        self._starting = 0
        self._open = False
        self._intake = JobIntake(deps, self._held, self._tasks, self._take)
        self._orphans = Orphans(deps, self._held, self._tasks, self._intake.models, self._take)
        self._ender = JobEnder(deps)
        self._admission = JobAdmission(deps, self._held, self._ender, ResultLookup(results, self._tasks))
        self._runner = JobRunner(deps, self._ender, self._intake.pause)
        self._watch = JobWatch(deps, self._held)
        self._sweeper = JobSweeper(deps, self._intake.has_capacity)
        self._malformed = MalformedJobs(deps, self._ender, self._tasks)
        ingress.attach(self)

    async def run(self) -> None:
        async with self._tasks:
            try:
                await self._deps.messaging.subscribe(self._deps.subjects.cancel_jobs(), self._watch.on_cancel)
                self._tasks.spawn(self._watch.run())
                self._tasks.spawn(self._sweeper.run())
                self._open = True
                self._intake.start()
                await asyncio.get_running_loop().create_future()
            finally:
                self._open = False
                self._intake.stop()

    def carries(self, job: str, nonce: str) -> bool:
        return self._deps.ingress.lease_held and any(has_precedence(held, nonce) for held in self._held.of(job))

    @property
    def jobs(self) -> int:
        return len(self._held)

    async def drain(self, grace_s: float) -> None:
        """Take no more jobs, let those that run finish for `grace_s`, and give the rest back to the queue."""
        self._open = False
        self._intake.stop()
        records = self._deps.messaging.bucket(self._deps.subjects.bucket("state"))
        ingress = self._deps.ingress.id

        async def announce() -> None:  # so that no carrier takes this for a death that a job has caused
            await records.put(drained_key(ingress), b"1", ttl_s=LONGEST_DEADLINE_S)

        loop = asyncio.get_running_loop()
        until = loop.time() + grace_s
        try:
            async with asyncio.timeout_at(until):
                await until_done(announce, event="drain.retry", retry_s=self._deps.settings.timing.retry_s, carrier=ingress)
                while len(self._held):
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            log.info("jobs.given_back", carrier=ingress, jobs=len(self._held))
        for held in self._held:
            self._forget(held, "drain")
            if self._deps.ingress.lease_held:
                held.delivery.nak()

    # What arrives:

    def _take(self, slug: str, delivery: Delivery) -> None:
        try:
            self._on_delivery(slug, delivery)
        except Exception as error:  # one job must neither end the carrier nor come again for ever
            note_failure("job", error, seq=delivery.stream_seq)
            self._malformed.end(delivery, f"it cannot be read: {type(error).__name__}")
            self._intake.balance()

    def _on_delivery(self, slug: str, delivery: Delivery) -> None:
        if not self._deps.ingress.lease_held or not self._open or self._held.redelivered(delivery):
            self._intake.balance()
            return
        try:
            tenant = self._tenant_of(delivery.subject)
            job = parse_job(delivery.data, delivery.headers, tenant=tenant, seq=delivery.stream_seq, stored=delivery.stored)
        except (JobMalformed, SubjectError) as error:
            self._malformed.end(delivery, str(error))
            self._intake.balance()
            return
        held = HeldJob(job, slug, delivery, self._deps.messaging, self._deps.subjects, nonce=self._nonces.next())
        if (displaced := self._held.add(held)) is not None:
            self._forget(displaced, "displaced")
        self._waiting.add(held)
        metrics.TAKEN.inc()
        self._start_more()

    def _start_more(self) -> None:
        while self._waiting and self._starting < self._deps.settings.starting and self._open:
            held = self._waiting.take(self._started)
            if held is None:
                return
            held.phase = "starting"
            self._starting += 1
            self._started[held.job.tenant] += 1
            held.task = self._tasks.spawn_guarded(self._carry(held), partial(self._failed, held))
            held.task.add_done_callback(partial(self._done, held))

    # What becomes of it:

    async def _carry(self, held: HeldJob) -> None:
        log.debug("job.taken", stored_job=held.job.id, tenant=held.job.tenant, delivery=held.num_delivered)
        self._deps.notices.step(held.ref, "taken")
        try:
            admitted = await self._admission.admit(held)
            self._has_started(held)
            if admitted == "submit":
                await self._runner.run(held)
        except StreamIncomplete as error:  # nothing can bring it back, and no end can follow: only the result can say so
            log.error("stream.incomplete", stored_job=held.job.id, tenant=held.job.tenant, error=str(error))
            await self._ender.end_unreadable(held)

    def _failed(self, held: HeldJob, error: Exception) -> None:
        note_failure("job", error, stored_job=held.job.id, delivery=held.num_delivered)
        metrics.LEFT.labels("failed").inc()
        if held.num_delivered >= MOST_FAILURES:
            self._malformed.end(held.delivery, f"it has failed {held.num_delivered} times: {type(error).__name__}")

    def _done(self, held: HeldJob, _task: asyncio.Task[None]) -> None:
        self._has_started(held)
        self._started[held.job.tenant] -= 1
        self._held.remove(held)
        self._start_more()
        self._intake.balance()

    def _has_started(self, held: HeldJob) -> None:
        if held.phase == "starting":
            held.phase = "running"
            self._starting -= 1
            self._start_more()

    def on_lease(self, held: bool) -> None:
        """Forget every job at a lapse: no ack, no extension; another carrier stops or takes over."""
        if not held:
            for job in self._held:
                self._forget(job, "lapse")
        self._intake.balance()

    def _forget(self, held: HeldJob, reason: str) -> None:
        metrics.LEFT.labels(reason).inc()
        log.info("job.left", stored_job=held.job.id, tenant=held.job.tenant, reason=reason)
        self._held.remove(held)
        self._waiting.remove(held)
        if held.task is not None:
            held.task.cancel()
