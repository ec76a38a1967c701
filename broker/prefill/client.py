"""The decode worker's side: have a prompt computed by another worker, and know at every moment whether it still is.

Whoever takes a job must keep answering: it is asked every half second how the job stands, and once more right before its
parameters are used, for engines wait long for a dead peer, and blocks that nobody keeps any more can be read without an error.
Whatever goes wrong is a `PrefillFailed` with a reason, within a bounded time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, encode
from headrace.broker.errors import WireError
from headrace.broker.membership.members import Members
from headrace.broker.membership.mover import message_ttl_s
from headrace.broker.messages import WorkerMember
from headrace.broker.messages.prefill import (
    PrefillCheck,
    PrefillDone,
    PrefillDrop,
    PrefillJob,
    PrefillState,
    PrefillTaken,
    PrefillVerdict,
)
from headrace.broker.prefill.errors import FailReason, PrefillFailed
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import JetStreamError, NoResponder, NotConnected, QueueFull, RequestTimeout

log = structlog.get_logger()

PROBE_S = 0.5  # how often a prefill worker is asked how the job stands
PROBE_TIMEOUT_S = 1.0
GONE_PROBES = 2  # in a row without a responder: its process is gone
SILENT_PROBES = 3  # in a row without an answer: it is frozen, or might as well be. A starved one may be late once or twice
LOOK_S = 0.25  # how often the members are looked at while nobody has taken the job
MOST_UNWANTED = 1024
QUEUED_AT_MOST_S = 60.0  # a job that is forgotten in the stream goes by itself


@dataclass(slots=True)
class Asked:
    """One job on its way. `directed`: the worker it was sent to, if it is not for any."""

    job: PrefillJob
    directed: str
    seq: int = 0  # of the stored message
    worker: str = ""  # who has taken it
    taken: asyncio.Future[PrefillTaken] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    done: asyncio.Future[PrefillDone] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class PrefillClient:
    """All jobs that one decode worker has asked for."""

    def __init__(
        self,
        deps: WorkerDeps,
        members: Members,
        *,
        pool: str,
        worker: str,
    ) -> None:
        self._messaging = deps.messaging
        self._subjects = deps.subjects
        self._timing = deps.timing
        self._wall = deps.wall
        self._members = members
        self._pool = pool
        self._worker = worker
        self._asked: dict[str, Asked] = {}
        self._unwanted: asyncio.Queue[int] = asyncio.Queue(MOST_UNWANTED)  # stored jobs that nobody has taken

    async def run(self) -> None:
        """Delete what nobody should take any more, until cancelled. Should it fail: who takes it is told that it is stale."""
        stream = self._subjects.stream("PREFILL")
        while True:
            seq = await self._unwanted.get()
            try:
                await self._messaging.delete_message(stream, seq)
            except JetStreamError as error:
                log.debug("prefill.not_deleted", seq=seq, error=str(error))

    def __len__(self) -> int:
        return len(self._asked)

    def peers(self, handover: str, adapter: str | None = None) -> list[WorkerMember]:
        """Prefill workers that are ready, have the adapter, and whose engines can hand over to one with this word."""
        return self._members.prefill_workers(self._pool, handover, adapter)

    # -- the way of a job ------------------------------------------------------------------------------------

    async def publish(self, job: PrefillJob, *, directed: str = "") -> None:
        """Put it into the queue. Raises PrefillFailed."""
        asked = self._asked[job.job] = Asked(job, directed)
        try:
            ack = await self._messaging.publish(
                self._subjects.prefill(self._pool, directed or None),
                encode(job),
                msg_id=job.job,
                ttl_s=min(message_ttl_s(job.deadline, self._wall(), self._timing.ttl_slack_s), QUEUED_AT_MOST_S),
                timeout_s=self._timing.publish_timeout_s,
            )
        except QueueFull as error:
            raise self._failed(job.job, "queue_full", str(error)) from None
        except JetStreamError as error:  # should it be stored all the same, whoever takes it is told that it is stale
            raise self._failed(job.job, "broker", str(error)) from None
        asked.seq = ack.seq

    async def taken(self, job: str, *, wait_s: float) -> PrefillTaken:
        """Wait until somebody works on it. Raises PrefillFailed."""
        asked = self._asked[job]
        loop = asyncio.get_running_loop()
        give_up = loop.time() + min(wait_s, max(0.0, asked.job.deadline - self._wall()))
        while not asked.taken.done():
            left = give_up - loop.time()
            if left <= 0:
                raise self._failed(job, "not_taken", f"nobody took the prefill job within {wait_s:g} s")
            if asked.directed and not self._members.worker_live(self._pool, asked.directed):
                raise self._failed(job, "peer_lost", f"prefill worker {asked.directed} is gone")
            await asyncio.wait([asked.taken], timeout=min(left, LOOK_S))
        return asked.taken.result()

    async def done(self, job: str) -> PrefillDone:
        """Wait until it is computed (style params) or over (rendezvous). Raises PrefillFailed."""
        asked = self._asked[job]
        while True:
            await asyncio.wait([asked.done], timeout=PROBE_S)
            if asked.done.done():
                break
            if asked.job.deadline <= self._wall():
                raise self._failed(job, "deadline", "the deadline passed while the prompt was computed elsewhere")
            state = await self._ask(asked, until_done=True)
            if asked.done.done():
                break
            if state.state == "unknown":
                raise self._failed(job, "peer_lost", f"prefill worker {asked.worker} lost the job")
        done = asked.done.result()
        if done.fault is not None:
            raise self._failed(job, "peer_failed", f"prefill worker {done.worker}: {done.fault.message}")
        return done

    async def confirm(self, job: str, *, least_s: float) -> float:
        """Right before its parameters are used: for how long the blocks are kept, at least `least_s`. Raises PrefillFailed."""
        asked = self._asked[job]
        state = await self._ask(asked)
        if state.state == "held" and state.left_s >= least_s:
            return state.left_s
        raise self._failed(job, "expired", f"prefill worker {asked.worker} keeps the blocks no longer ({state.state})")

    def settle(self, job: str) -> str:
        """The blocks are here, or nobody wants them: the prefill worker may forget them. Fine when unknown.

        Returns who had taken it, if somebody had.
        """
        asked = self._asked.pop(job, None)
        if asked is None:
            return ""
        for future in (asked.taken, asked.done):
            future.cancel()
        if asked.worker:
            self._messaging.send(self._subjects.control(asked.worker), encode(PrefillDrop(jobs=[job])))
        elif asked.seq and not self._unwanted.full():
            self._unwanted.put_nowait(asked.seq)
        return asked.worker

    # -- what prefill workers say ----------------------------------------------------------------------------

    def on_taken(self, said: PrefillTaken) -> PrefillVerdict:
        asked = self._asked.get(said.job)
        if asked is None or asked.worker not in ("", said.worker):
            return PrefillVerdict(verdict="stale")
        asked.worker = said.worker
        if not asked.taken.done():
            asked.taken.set_result(said)
        return PrefillVerdict(verdict="go")

    def on_done(self, said: PrefillDone) -> PrefillVerdict:
        verdict = self.on_taken(PrefillTaken(job=said.job, worker=said.worker))  # should that message have been lost
        if verdict.verdict == "go" and not (done := self._asked[said.job].done).done():
            done.set_result(said)
        return verdict

    # -- inside ----------------------------------------------------------------------------------------------

    async def _ask(self, asked: Asked, *, until_done: bool = False) -> PrefillState:
        """How the job stands, asked until there is an answer, or `until_done`. Raises PrefillFailed when there will be none.

        While this worker itself is cut off, silence says nothing, and is waited out.
        """
        subject = self._subjects.control(asked.worker)
        question = encode(PrefillCheck(job=asked.job.job))
        silent = gone = 0
        while silent < SILENT_PROBES and gone < GONE_PROBES and not asked.done.cancelled():
            if asked.job.deadline <= self._wall():
                raise self._failed(asked.job.job, "deadline", "the deadline passed while the prompt was computed elsewhere")
            try:
                return decode(PrefillState, await self._messaging.request(subject, question, timeout_s=PROBE_TIMEOUT_S))
            except NotConnected:
                await asyncio.sleep(self._timing.retry_s)
            except NoResponder:
                gone += 1
                await asyncio.sleep(self._timing.retry_s)
            except RequestTimeout:
                silent, gone = silent + 1, 0
            except WireError as error:
                silent += 1
                metrics.MALFORMED.labels("reply").inc()
                log.error("reply.malformed", worker=asked.worker, error=str(error))
            if until_done and asked.done.done():
                return PrefillState(state="held")
        raise self._failed(asked.job.job, "peer_lost", f"prefill worker {asked.worker} does not answer")

    def _failed(self, job: str, reason: FailReason, message: str) -> PrefillFailed:
        by = self.settle(job)
        return PrefillFailed(reason, message, worker=by)
