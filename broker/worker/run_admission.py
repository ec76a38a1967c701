"""From a stored message to a running job: which run it is, whether it may start, whether anybody has to be asked first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, parse_job_headers, parse_prefill_header
from headrace.broker.dead_letters import dead_letter
from headrace.broker.errors import BrokerError, WireError
from headrace.broker.membership.mover import Mover
from headrace.broker.messages import Envelope, JobFault
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.protocol.runs import Tombstones
from headrace.broker.spill import fetch_payload
from headrace.broker.worker.judge_client import JudgeClient
from headrace.jetstream.ports import Delivery, Messaging
from headrace.jetstream.subjects import Subjects

if TYPE_CHECKING:
    from headrace.broker.worker.session import WorkerSession

log = structlog.get_logger()

ALONE_POLL_S = 0.1
RETRY_AFTER_S = 5.0  # of a request whose adapter no worker has


class RunAdmission:
    """Starts the work of one worker session. `tasks` must be set before the first delivery."""

    def __init__(
        self,
        session: WorkerSession,
        messaging: Messaging,
        subjects: Subjects,
        settling: JudgeClient,
        mover: Mover,
        tombstones: Tombstones,
        *,
        arrived: Callable[[str, int], None],
        begin: Callable[[Run, bytes], None],
        random_bits: Callable[[int], int],
        wall: Callable[[], float],
    ) -> None:
        """`arrived(id, attempt)`: it is here. `begin(run, payload)`: its logs are open, the engine may have it."""
        self._session = session
        self._messaging = messaging
        self._subjects = subjects
        self._settling = settling
        self._mover = mover
        self._tombstones = tombstones
        self._arrived = arrived
        self._begin = begin
        self._random_bits = random_bits
        self._wall = wall
        self.tasks: asyncio.TaskGroup | None = None

    def on_work(self, delivery: Delivery) -> None:
        if (old := self._session.runs.displaced(delivery)) is not None:
            log.warning("work.displaced", request_id=old.id, seq=old.seq)
            self._session.abandon(old)
        if self._session.runs.redelivered(delivery):
            self._session.balance()
            return
        if not self._session.registered or not self._session.taking or self.tasks is None:
            delivery.nak(self._session.retry_s)
            return
        if not self._session.member.serves:  # it was placed here while this worker still served
            self.tasks.create_task(self._return(delivery))
            return
        try:
            envelope = decode(Envelope, delivery.data)
            attempt, history = parse_job_headers(delivery.headers)
            decision = parse_prefill_header(delivery.headers)
        except WireError as error:
            metrics.MALFORMED.labels("work").inc()
            log.error("work.malformed", seq=delivery.stream_seq, error=str(error))
            dead_letter(self._messaging, self._subjects, self._session.pool, delivery, str(error), wall=self._wall)
            self._session.balance()
            return
        run = Run(envelope=envelope, attempt=attempt, history=history, run=self._random_bits(64), delivery=delivery)
        run.prefill = decision
        self._session.runs.add(run)
        metrics.RUNS.set(len(self._session.runs))
        self._arrived(run.id, attempt)
        if self._starts_at_once(run):
            run.begin([], [])
            self._begin(run, envelope.payload)
        else:
            self.tasks.create_task(self._admit(run))
        self._session.balance()

    async def _return(self, delivery: Delivery) -> None:
        await self._mover.move(
            worker=self._session.worker,
            seq=delivery.stream_seq,
            data=delivery.data,
            headers=delivery.headers,
            suspect=None,
            reason="role",
        )
        self._session.balance()

    def _starts_at_once(self, run: Run) -> bool:
        """First attempt, first delivery, nothing to ask anybody: no round trip before the first token."""
        return (
            run.attempt == 1
            and run.delivery.num_delivered == 1
            and not run.history
            and run.envelope.spill is None
            and run.id not in self._tombstones
            and run.envelope.deadline > self._wall()
            and self._session.adapters.usable(run.envelope.adapter)
            and self._session.members.ingress_live(run.judge)
            and self._session.runs.may_start(run)
        )

    async def _admit(self, run: Run) -> None:
        if run.id in self._tombstones or await self._session.members.ingress_gone(run.judge):
            self._session.drop(run, how="cancelled" if run.id in self._tombstones else "judge_gone")
            return
        if run.envelope.deadline <= self._wall():
            await self._settling.refuse(run, JobFault("deadline_exceeded", "the deadline passed in the queue", retriable=True))
            self._session.drop(run, how="deadline")
            return
        if not await self._take_over(run) or not await self._has_adapter(run):
            return
        try:
            payload = await fetch_payload(
                self._messaging, self._subjects, run.envelope, wanted=lambda: run.state is RunState.CLAIMING
            )
        except BrokerError as error:
            if run.state is RunState.CLAIMING:
                self._session.fail(run, JobFault("engine_error", str(error)))
            return
        if run.state is RunState.CLAIMING and not self._session.engine_dead:
            self._begin(run, payload)

    async def _has_adapter(self, run: Run) -> bool:
        """False: its adapter was unloaded while it was on its way; it goes on where that is, or ends if it is nowhere."""
        adapter = run.envelope.adapter
        if self._session.adapters.usable(adapter) or run.state is not RunState.CLAIMING:
            return True
        if self._session.members.having(self._session.pool, adapter):
            await self._session.move(run, suspect=None, reason="adapter")
        else:
            message = f"no ready worker has the adapter {adapter!r}"
            self._session.fail(run, JobFault("no_worker", message, retriable=True, retry_after_s=RETRY_AFTER_S))
        return False

    async def _take_over(self, run: Run) -> bool:
        """Wait for its turn, claim where that is needed and open the logs. False: it is not to run here."""
        while await self._has_turn(run):
            if run.attempt == 1 and run.delivery.num_delivered == 1:
                run.begin([], [])
                return True
            reply = await self._settling.claim(run)
            if run.state is not RunState.CLAIMING:
                return False
            if reply.verdict not in ("go", "wait"):
                self._session.drop(run, how=reply.verdict)
                return False
            self._session.runs.set_crashes(run, reply.crashes)
            if reply.verdict == "go":
                run.begin(reply.emitted, reply.finished)
                return True
            run.wait_again()  # the judge knows of more crashes than this copy's history
        return False

    async def _has_turn(self, run: Run) -> bool:
        """Wait until a waiting run may go on to its claim. False when it is gone, or is moved instead."""
        while run.state is RunState.WAITING:
            if self._session.taking and self._session.runs.may_start(run):
                run.claim()
                return True
            await asyncio.sleep(ALONE_POLL_S)
        return False
