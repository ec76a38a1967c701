"""Carries stored jobs: pulls them, takes them through their checks, and runs them, while this ingress holds its lease."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial

import structlog

from headrace.broker.durable import metrics
from headrace.broker.durable.carrier.admission import JobAdmission
from headrace.broker.durable.carrier.carrier_deps import CarrierDeps
from headrace.broker.durable.carrier.held_job import HeldJob, HeldJobs, has_precedence
from headrace.broker.durable.carrier.intake import JobIntake
from headrace.broker.durable.carrier.job_end import JobEnder
from headrace.broker.durable.carrier.job_run import JobRunner
from headrace.broker.durable.carrier.job_watch import JobWatch
from headrace.broker.durable.carrier.malformed_jobs import MalformedJobs
from headrace.broker.durable.carrier.notices import JobNotices
from headrace.broker.durable.carrier.sweep import JobSweeper
from headrace.broker.durable.carrier.waiting_jobs import WaitingJobs
from headrace.broker.durable.errors import JobMalformed, StreamIncomplete
from headrace.broker.durable.names import Nonces
from headrace.broker.durable.outside_end import OutsideEnds
from headrace.broker.durable.ports import CarriedBatches, JobRenderer
from headrace.broker.durable.result_lookup import ResultLookup
from headrace.broker.durable.result_store import ResultStore
from headrace.broker.durable.stored_job import parse_job
from headrace.broker.failed_deliveries import note_failure
from headrace.broker.ingress.ingress import Ingress
from headrace.broker.membership.members import drained_key
from headrace.broker.retry import until_done
from headrace.broker.settings import CarrierSettings
from headrace.jetstream.errors import SubjectError
from headrace.jetstream.ports import Delivery, Messaging
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import LONGEST_DEADLINE_S

log = structlog.get_logger()

MOST_FAILURES = 3  # deliveries of a job whose carrying fails unforeseen, before it ends
DRAIN_POLL_S = 0.05
KNOWN_SUBJECTS = 1024  # of jobs, whose tenants are remembered: all jobs of a tenant and a model share one


class Carrier:
    """The stored jobs of one ingress. Run it beside the ingress, whose lease is its own."""

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
        """`batches` is None where no batch is run; `wall` gives Unix time."""
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
        self._ender = JobEnder(deps)
        self._admission = JobAdmission(deps, self._held, self._ender, ResultLookup(results, self._tasks))
        self._runner = JobRunner(deps, self._ender, self._intake.pause)
        self._watch = JobWatch(deps, self._held)
        self._sweeper = JobSweeper(deps, self._intake.has_capacity)
        self._malformed = MalformedJobs(deps, self._ender, self._tasks)
        ingress.on_lease(self._on_lease)
        ingress.on_carrying(self.carries)

    async def run(self) -> None:
        """Carry jobs until cancelled."""
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
        """Return whether a job, by its id, is carried here for a carrier that asks with its own delivery `nonce`."""
        return self._deps.ingress.lease_held and any(has_precedence(held, nonce) for held in self._held.of(job))

    @property
    def jobs(self) -> int:
        """The number of jobs that are held here."""
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
            await self._ender.end_unreadable(held, str(error))

    def _failed(self, held: HeldJob, error: Exception) -> None:
        """Leave a job whose carrying fails to its redelivery, and end it when that has failed several times."""
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

    def _on_lease(self, held: bool) -> None:
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
