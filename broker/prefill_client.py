"""The decode worker's side of a KV transfer: has a prompt computed by a prefill worker, and probes it until it is done."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal, get_args

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, encode
from headrace.broker.errors import BrokerError, WireError
from headrace.broker.membership.members import Members
from headrace.broker.membership.mover import message_ttl_s
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.prefill import (
    PrefillCheck,
    PrefillDone,
    PrefillDrop,
    PrefillJob,
    PrefillState,
    PrefillTaken,
    PrefillVerdict,
)
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import JetStreamError, NoResponder, NotConnected, QueueFull, RequestTimeout

FailReason = Literal[
    "queue_full",  # the prefill queue takes nothing more
    "broker",  # the job could not be stored, or it is not known whether it was
    "not_taken",  # no worker took it in time
    "peer_lost",  # the worker that took it answers no more
    "peer_failed",  # the worker that took it says that it cannot
    "expired",  # the blocks are not kept long enough to be fetched
    "transfer_failed",  # the engine could not fetch them
    "transfer_timeout",  # the engine did not fetch them in time
    "deadline",
]
FAIL_REASONS: tuple[FailReason, ...] = get_args(FailReason)

ANOTHER_TRY: frozenset[FailReason] = frozenset({"peer_lost", "peer_failed", "expired", "transfer_failed"})
"""Reasons after which another prefill worker is tried, because it is not the queue that failed."""


class PrefillFailed(BrokerError):
    """A hand-over failed. `reason` is a metric label; `worker` had taken the job, and is empty if none had."""

    def __init__(self, reason: FailReason, message: str, *, worker: str = "") -> None:
        super().__init__(message)
        self.reason: FailReason = reason
        self.worker = worker


# The decode worker's side of a hand-over: has a prompt computed by a prefill worker, and probes it until it is done.
#
# A prefill worker that has taken a job must keep answering: it is asked every half second how the job stands, and once more
# right before its parameters are used, for engines wait long for a dead peer, and blocks that are no longer kept can be read
# without an error. Every failure is a `PrefillFailed` with a reason, within a bounded time.

log = structlog.get_logger()

PROBE_S = 0.5  # how often a prefill worker is asked how the job stands
PROBE_TIMEOUT_S = 1.0
GONE_PROBES = 2  # so many probes in a row without a responder: its process is gone
SILENT_PROBES = 3  # so many probes in a row without an answer: it is as good as frozen. A starved one may be late once or twice
LOOK_S = 0.25  # how often the members are read while the job is not taken
MOST_UNWANTED = 1024
QUEUED_AT_MOST_S = 60.0  # after so long a job that was left in the stream expires


@dataclass(slots=True)
class Asked:
    """A requested job. `directed`: the worker it was sent to; empty: any may take it."""

    job: PrefillJob
    directed: str
    seq: int = 0  # of the stored message
    worker: str = ""  # the worker that has taken it
    taken: asyncio.Future[PrefillTaken] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    done: asyncio.Future[PrefillDone] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class PrefillClient:
    def __init__(self, deps: WorkerDeps, members: Members, *, pool: str, worker: str) -> None:
        self._messaging = deps.messaging
        self._subjects = deps.subjects
        self._timing = deps.timing
        self._wall = deps.wall
        self._members = members
        self._pool = pool
        self._worker = worker
        self._asked: dict[str, Asked] = {}
        self._unwanted: asyncio.Queue[int] = asyncio.Queue(MOST_UNWANTED)  # stored jobs that were not taken

    async def run(self) -> None:
        """Delete stored jobs that are no longer wanted, until cancelled.

        If that fails, the job is answered as stale when it is taken.
        """
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
        return self._members.prefill_workers(self._pool, handover, adapter)

    async def publish(self, job: PrefillJob, *, directed: str = "") -> None:
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
        except JetStreamError as error:  # if it is stored all the same, it is answered as stale when it is taken
            raise self._failed(job.job, "broker", str(error)) from None
        asked.seq = ack.seq

    async def taken(self, job: str, *, wait_s: float) -> PrefillTaken:
        """Wait until a prefill worker has taken a job. Raises PrefillFailed."""
        asked = self._asked[job]
        loop = asyncio.get_running_loop()
        give_up = loop.time() + min(wait_s, max(0.0, asked.job.deadline - self._wall()))
        while not asked.taken.done():
            left = give_up - loop.time()
            if left <= 0:
                raise self._failed(job, "not_taken", f"no worker took the prefill job within {wait_s:g} s")
            if asked.directed and not self._members.worker_live(self._pool, asked.directed):
                raise self._failed(job, "peer_lost", f"prefill worker {asked.directed} is gone")
            await asyncio.wait([asked.taken], timeout=min(left, LOOK_S))
        return asked.taken.result()

    async def done(self, job: str) -> PrefillDone:
        """Wait until a job is computed (style params) or over (rendezvous). Raises PrefillFailed."""
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
        """Ask, right before its parameters are used, for how many seconds the blocks are kept.

        Raises PrefillFailed if they are kept for less than `least_s`.
        """
        asked = self._asked[job]
        state = await self._ask(asked)
        if state.state == "held" and state.left_s >= least_s:
            return state.left_s
        raise self._failed(job, "expired", f"prefill worker {asked.worker} keeps the blocks no longer ({state.state})")

    def settle(self, job: str) -> str:
        """End a job whose blocks are here or are not wanted: the prefill worker may forget them. Fine when unknown.

        Returns the worker that had taken it, or nothing.
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

    def on_taken(self, message: PrefillTaken) -> PrefillVerdict:
        """Answer a prefill worker that has taken a job. One that is unknown, or another worker's, is stale."""
        asked = self._asked.get(message.job)
        if asked is None or asked.worker not in ("", message.worker):
            return PrefillVerdict(verdict="stale")
        asked.worker = message.worker
        if not asked.taken.done():
            asked.taken.set_result(message)
        return PrefillVerdict(verdict="go")

    def on_done(self, message: PrefillDone) -> PrefillVerdict:
        verdict = self.on_taken(PrefillTaken(job=message.job, worker=message.worker))  # in case that message was lost
        if verdict.verdict == "go" and not (done := self._asked[message.job].done).done():
            done.set_result(message)
        return verdict

    async def _ask(self, asked: Asked, *, until_done: bool = False) -> PrefillState:
        """Ask how a job stands until there is an answer or, with `until_done`, the job is done. Raises PrefillFailed.

        While this worker itself is cut off, silence means nothing, and is waited out.
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
