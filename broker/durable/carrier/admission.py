"""Takes a delivered job through what comes before its submission: has it ended, does another have it, is it poison?"""

from __future__ import annotations

import asyncio
from typing import Literal

import structlog

from headrace.broker.codec import decode, encode
from headrace.broker.durable import metrics
from headrace.broker.durable.carrier.carrier_deps import CarrierDeps, known
from headrace.broker.durable.carrier.held_job import HeldJob, HeldJobs, has_precedence
from headrace.broker.durable.carrier.job_end import JobEnder
from headrace.broker.durable.decision import asks_carriers, has_entries, is_carrier_poison, is_left_to
from headrace.broker.durable.errors import CarrierLost
from headrace.broker.durable.result_lookup import ResultLookup
from headrace.broker.durable.stream_writer import read_stream
from headrace.broker.errors import WireError
from headrace.broker.membership.members import drained_key
from headrace.broker.messages import Carrying, Done, JobFault, JobStatus
from headrace.jetstream.errors import JetStreamError, NoResponder

log = structlog.get_logger()

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
        """Return how a job has to end before it was run."""
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
        taker = held.stored.takes[-1].carrier if held.stored.takes else ingress.id
        others = [other for other in ingress.members.ingresses() if other not in (ingress.id, taker)]
        asked = [self._ask(other, held) for other in others]
        if taker == ingress.id:
            return is_left_to(False, await asyncio.gather(*asked), taker_gone=False)
        answer, *answers = await asyncio.gather(self._ask(taker, held), *asked)
        gone = answer is None and await ingress.judge_gone(taker)
        return is_left_to(answer, answers, taker_gone=gone)

    async def _ask(self, ingress: str, held: HeldJob) -> bool | None:
        """Ask an ingress whether it carries this job. Returns None if there was no answer."""
        subject = self._deps.subjects.judge(ingress)
        question = encode(Carrying(job=held.job.id, nonce=held.nonce))
        timeout_s = self._deps.settings.timing.rpc_timeout_s
        try:
            answer = await self._deps.messaging.request(subject, question, timeout_s=timeout_s)
            return decode(Done, answer).ok
        except (NoResponder, JetStreamError, WireError):
            return None

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
