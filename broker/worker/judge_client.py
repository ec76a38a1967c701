"""A worker's questions to judges: claims, checks and refusals, each asked until it is answered or the judge is gone."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, encode
from headrace.broker.errors import WireError
from headrace.broker.log_ids import log_ids
from headrace.broker.membership.members import Members
from headrace.broker.messages import (
    Check,
    CheckReply,
    Claim,
    ClaimReply,
    JobFault,
    Record,
    Refuse,
    RefuseReply,
    Suspicion,
    SuspicionQuery,
)
from headrace.broker.protocol.run import Run
from headrace.broker.protocol.trial import Turn
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import NoResponder, NotConnected, RequestTimeout
from headrace.jetstream.lease import LeaseKeeper

PATIENCE = 2.0  # an answer after a silence is waited for so many times as long

log = structlog.get_logger()
Reply = TypeVar("Reply", bound=Record)


class JudgeClient:
    """Asks judges, only while this worker holds its lease."""

    def __init__(self, deps: WorkerDeps, members: Members, lease: LeaseKeeper, *, worker: str) -> None:
        self._messaging = deps.messaging
        self._subjects = deps.subjects
        self._timing = deps.timing
        self._members = members
        self._lease = lease
        self._worker = worker

    async def claim(self, run: Run, turn: Turn) -> ClaimReply:
        """Ask for a run, with a promise for it. A judge that is gone counts as one that does not know the request."""
        claim = Claim(
            id=run.id,
            attempt=run.attempt,
            run=run.run,
            worker=self._worker,
            history=run.history,
            group=turn.group,
            beside=turn.beside,
        )
        reply = await self._ask([run], claim, ClaimReply)
        verdict = reply or ClaimReply(verdict="unknown")
        metrics.CLAIMS.labels(verdict.verdict).inc()
        return verdict

    async def suspicion(self, run: Run) -> Suspicion | None:
        """Ask how suspect a job is. None: its judge is gone, or the run is."""
        return await self._ask([run], SuspicionQuery(id=run.id, history=run.history), Suspicion)

    async def refuse(self, run: Run, fault: JobFault) -> None:
        """End a request that has no run. Returns when the judge has given any answer, or is gone."""
        reply = await self._ask([run], Refuse(id=run.id, attempt=run.attempt, fault=fault), RefuseReply)
        log.info("job.refused", **log_ids(run.envelope), code=fault.code, verdict=reply.verdict if reply else "judge gone")

    async def check(self, runs: list[Run]) -> dict[Run, str]:
        """Ask for the verdict on each run of one judge, after a lapse."""
        check = Check(worker=self._worker, runs=[run.ref for run in runs])
        while True:
            reply = await self._ask(runs, check, CheckReply)
            if reply is None:
                return dict.fromkeys(runs, "unknown")
            if len(reply.verdicts) == len(runs):
                return dict(zip(runs, reply.verdicts, strict=True))
            metrics.MALFORMED.labels("reply").inc()
            log.error("check.malformed", judge=runs[0].judge, asked=len(runs), answered=len(reply.verdicts))
            await asyncio.sleep(self._timing.retry_s)

    async def _ask(self, runs: list[Run], question: Record, kind: type[Reply]) -> Reply | None:
        """Ask the judge of these runs. None when it is gone, or when all of them were dropped meanwhile.

        After a silence the next answer is waited for twice as long, up to the TTL of a lease. One that takes longer than a
        fixed time, there and back and for what the judge reads before, would never be heard.
        """
        judge, timeout_s = runs[0].judge, self._timing.rpc_timeout_s
        subject = self._subjects.judge(judge)
        data = encode(question)
        while not all(run.gone for run in runs):
            if not self._lease.held:
                await asyncio.sleep(self._timing.retry_s)
                continue
            try:
                answer = await self._messaging.request(subject, data, timeout_s=timeout_s)
                return decode(kind, answer)
            except RequestTimeout as error:
                timeout_s = min(PATIENCE * timeout_s, max(self._timing.lease_ttl_s, self._timing.rpc_timeout_s))
                log.debug("judge.silent", judge=judge, error=str(error))
            except (NoResponder, NotConnected) as error:
                # Silence is a suspicion, never a verdict: work is dropped only when the judge's lease is gone.
                log.debug("judge.silent", judge=judge, error=str(error))
            except WireError as error:
                metrics.MALFORMED.labels("reply").inc()
                log.error("reply.malformed", judge=judge, error=str(error))
            if await self._members.ingress_gone(judge):
                return None
            await asyncio.sleep(self._timing.retry_s)
        return None
