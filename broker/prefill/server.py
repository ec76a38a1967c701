"""The prefill worker's side: pull jobs as far as the token budget reaches, have them computed, and keep the answer until it is
settled.

The decode worker owns the request.  So this side starts at once where a job is fresh, asks first where it is not, and stops
whatever the decode worker calls stale; a decode worker that is gone (a fresh read of its lease) wants nothing any more.  The
message of a job is acked when its answer has been taken, so a prefill worker that dies leaves it for the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, encode
from headrace.broker.dead_letters import dead_letter
from headrace.broker.errors import BrokerError, WireError
from headrace.broker.membership.members import Members
from headrace.broker.messages import JobFault
from headrace.broker.messages.prefill import PrefillDone, PrefillJob, PrefillState, PrefillTaken, PrefillVerdict
from headrace.broker.prefill.budget import TokenBudget
from headrace.broker.settings import Timing
from headrace.broker.spill import fetch_payload
from headrace.jetstream.errors import NoResponder, NotConnected, RequestTimeout
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Delivery, Messaging, PullLoop
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import prefill_consumer

log = structlog.get_logger()

FRESH_S = 1.0  # a younger job of a first delivery is started without a question
POLL_S = 0.05
PROMISED_S = 2.0  # what a decode worker asks for before it fetches; a worker that leaves keeps its word
ASK_AGAIN_S = 2.0  # blocks that are kept for longer: does anybody want them? That nobody does is said once, and may get lost


class PrefillExecutor(Protocol):
    """Computes prompts. All calls are synchronous and come on the event loop."""

    def uncached(self, job: PrefillJob) -> int:
        """Tokens that the engine will have to compute for it, as far as can be told."""

    def start(self, job: PrefillJob, payload: bytes) -> None:
        """Begin. The end is told by `PrefillServer.finished`, once."""

    def stop(self, job: str) -> None:
        """Abort it, or let go of its blocks; fine when unknown. `finished` is not called any more."""

    @property
    def lease_s(self) -> float:
        """How long the engine keeps blocks that nobody fetches."""

    @property
    def address(self) -> str:
        """Where the engine is met in a rendezvous."""


@dataclass(slots=True, eq=False)
class HeldPrefill:
    """A job this worker has. `state`: asking, running, telling (the answer is on its way), held (it was accepted), gone."""

    job: PrefillJob
    delivery: Delivery
    state: str = "asking"
    started_s: float = 0.0
    kept_until_s: float = 0.0  # by the engine, once it is computed
    asked_s: float = 0.0  # when the decode worker was last asked
    promised_until_s: float = 0.0  # it was told that the blocks are kept, and may be fetching them
    answer: PrefillDone | None = None
    computed: asyncio.Event = field(default_factory=asyncio.Event)


class PrefillServer:
    """All jobs of one prefill worker."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        members: Members,
        lease: LeaseKeeper,
        executor: PrefillExecutor,
        *,
        pool: str,
        worker: str,
        timing: Timing,
        budget_tokens: int,
        may_take: Callable[[], bool],
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`may_take`: lease held, in the role `prefill`, not leaving it."""
        self._messaging = messaging
        self._subjects = subjects
        self._members = members
        self._lease = lease
        self._executor = executor
        self._pool = pool
        self._worker = worker
        self._timing = timing
        self._budget = TokenBudget(budget_tokens)
        self._may_take = may_take
        self._wall = wall
        self._loop = asyncio.get_running_loop()
        self._held: dict[str, HeldPrefill] = {}
        self._leaving = False
        self._tasks: asyncio.TaskGroup | None = None
        self._pulls: list[PullLoop] = []
        self._specs = (prefill_consumer(subjects, pool, worker), prefill_consumer(subjects, pool))
        for spec in self._specs:
            self._pulls.append(
                messaging.pull(
                    spec.stream,
                    spec.name,
                    self._on_delivery,
                    on_missing=partial(messaging.ensure_consumer, spec),
                )
            )

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for pull in self._pulls:
                tasks.create_task(pull.run())
            tasks.create_task(self._upkeep())

    def balance(self) -> None:
        """Ask for as much as the budget allows; called whenever the budget, the lease or the role changes."""
        wanted = self._budget.credit if self._may_take() else 0
        for pull in self._pulls:
            if pull.credit < wanted or (pull.credit and not wanted):
                pull.add_credit(wanted - pull.credit)

    def __len__(self) -> int:
        return len(self._held)

    def states(self) -> dict[str, int]:
        """For operators: jobs by state."""
        counts: dict[str, int] = {}
        for held in self._held.values():
            counts[f"prefill_{held.state}"] = counts.get(f"prefill_{held.state}", 0) + 1
        return counts

    async def leave(self, grace_s: float) -> None:
        """With `may_take` false: finish, wait until what is computed was fetched, refuse what the grace period left over."""
        self.balance()
        deadline = self._loop.time() + grace_s
        while self._held and self._loop.time() < deadline:
            await asyncio.sleep(POLL_S)
        for held in list(self._held.values()):
            if held.state != "held":
                self._refuse(held, "this worker leaves")
        settled_by = self._loop.time() + self._timing.rpc_timeout_s
        while any(held.state == "telling" for held in self._held.values()) and self._loop.time() < settled_by:
            await asyncio.sleep(POLL_S)
        self._leaving = True
        while any(held.promised_until_s > self._loop.time() for held in self._held.values()):
            await asyncio.sleep(POLL_S)
        for job in list(self._held):
            self.drop(job)
        self._leaving = False  # it may come back to this role

    async def ensure_consumers(self) -> None:
        """Before the first pull; later on each is made again when it is missing. Raises JetStreamError."""
        for spec in self._specs:
            await self._messaging.ensure_consumer(spec)

    async def forget_consumer(self) -> None:
        """Nobody will read this worker's own jobs any more. Raises JetStreamError."""
        await self._messaging.delete_consumer(
            self._subjects.stream("PREFILL"), self._subjects.prefill_consumer(self._pool, self._worker)
        )

    async def _upkeep(self) -> None:
        """Extend claims; drop what the engine keeps no longer, and what belongs to decode workers that are gone."""
        while True:
            await asyncio.sleep(self._timing.ack_wait_s / 3)
            now = self._loop.time()
            absent: set[str] = set()
            for held in list(self._held.values()):
                if held.state == "held":
                    if held.kept_until_s <= now:
                        log.warning("prefill.never_fetched", job=held.job.job, decode=held.job.decode)
                        metrics.PREFILL_JOBS.labels("never_fetched").inc()
                        self.drop(held.job.job)
                        continue
                    if now > held.asked_s + ASK_AGAIN_S and held.answer is not None and self._tasks is not None:
                        held.asked_s = now
                        self._tasks.create_task(self._ask(held, held.answer, again=False))
                elif self._lease.held:
                    held.delivery.progress()
                if not self._members.worker_live(self._pool, held.job.decode):
                    absent.add(held.job.decode)
            for decode_worker in absent:
                if await self._members.worker_gone(self._pool, decode_worker):
                    self._drop_all_of(decode_worker)
            self.balance()

    def _drop_all_of(self, decode_worker: str) -> None:
        """But for what is promised: it may only have lost its lease, and be fetching."""
        now = self._loop.time()
        for held in list(self._held.values()):
            if held.job.decode != decode_worker or held.promised_until_s > now:
                continue
            metrics.PREFILL_JOBS.labels("decode_gone").inc()
            self.drop(held.job.job)

    # -- jobs come -------------------------------------------------------------------------------------------

    def _on_delivery(self, delivery: Delivery) -> None:
        try:
            job = decode(PrefillJob, delivery.data)
        except WireError as error:
            metrics.MALFORMED.labels("prefill_job").inc()
            log.error("prefill.malformed", seq=delivery.stream_seq, error=str(error))
            dead_letter(self._messaging, self._subjects, self._pool, delivery, str(error), wall=self._wall)
            self.balance()
            return
        known = self._held.get(job.job)
        if known is not None:  # the server has lost patience while this job is here
            known.delivery = delivery
            if known.state == "held":
                delivery.ack()
        elif not self._may_take() or self._tasks is None:
            delivery.nak()
        elif job.deadline <= self._wall():
            metrics.PREFILL_JOBS.labels("deadline").inc()
            delivery.ack()
        else:
            held = self._held[job.job] = HeldPrefill(job, delivery)
            self._budget.take(job.job, self._executor.uncached(job))
            self._tasks.create_task(self._serve(held))
        self.balance()

    async def _serve(self, held: HeldPrefill) -> None:
        fresh = held.delivery.num_delivered == 1 and abs(self._wall() - held.job.created) < FRESH_S
        if fresh and not await self._start(held):
            return
        taken = PrefillTaken(job=held.job.job, worker=self._worker, address=self._executor.address)
        if not await self._ask(held, taken) or (not fresh and not await self._start(held)):
            return
        await held.computed.wait()
        if held.answer is None or not await self._ask(held, held.answer):
            return
        held.delivery.ack()
        if held.answer.fault is not None or held.answer.params is None:  # nothing is kept for anybody
            self._forget(held)
        else:
            held.state = "held"
            held.asked_s = self._loop.time()

    async def _start(self, held: HeldPrefill) -> bool:
        """False: it is gone. True also when it was refused meanwhile, for that is still to be told."""
        try:
            payload = await fetch_payload(self._messaging, self._subjects, held.job, wanted=lambda: held.state == "asking")
        except BrokerError as error:
            if held.state == "asking":
                self._refuse(held, str(error))
        if held.state != "asking":
            return held.state != "gone"
        held.state = "running"
        held.started_s = self._loop.time()
        self._executor.start(held.job, payload)
        return True

    async def _ask(self, held: HeldPrefill, what: PrefillTaken | PrefillDone, *, again: bool = True) -> bool:
        """Whether the decode worker says `go`; asked until it has said anything, or is gone. On `stale` the job is dropped."""
        subject = self._subjects.control(held.job.decode)
        data = encode(what)
        while held.state != "gone":
            try:
                verdict = decode(
                    PrefillVerdict, await self._messaging.request(subject, data, timeout_s=self._timing.rpc_timeout_s)
                )
            except (NoResponder, RequestTimeout, NotConnected) as error:
                log.debug("prefill.decode_silent", decode=held.job.decode, error=str(error))
            except WireError as error:
                metrics.MALFORMED.labels("reply").inc()
                log.error("reply.malformed", decode=held.job.decode, error=str(error))
            else:
                if verdict.verdict == "go":
                    return held.state != "gone"
                metrics.PREFILL_JOBS.labels("stale").inc()
                self.drop(held.job.job)
                return False
            gone = await self._members.worker_gone(self._pool, held.job.decode)
            if gone and held.promised_until_s <= self._loop.time():
                metrics.PREFILL_JOBS.labels("decode_gone").inc()
                self.drop(held.job.job)
                return False
            if not again:
                return False
            await asyncio.sleep(self._timing.retry_s)
        return False

    # -- jobs end --------------------------------------------------------------------------------------------

    def finished(self, done: PrefillDone) -> None:
        """The engine's last word on a job."""
        held = self._held.get(done.job)
        if held is None or held.state != "running":
            return
        now = self._loop.time()
        metrics.PREFILL_JOBS.labels("computed" if done.fault is None else "failed").inc()
        held.answer = done
        held.state = "telling"
        held.kept_until_s = now + self._executor.lease_s
        self._budget.give_back(done.job)
        held.computed.set()
        self.balance()

    def _refuse(self, held: HeldPrefill, why: str) -> None:
        """This worker will not do it. What its engine has of it is let go of."""
        self._executor.stop(held.job.job)
        metrics.PREFILL_JOBS.labels("refused").inc()
        held.answer = PrefillDone(job=held.job.job, worker=self._worker, fault=JobFault("prefill_refused", why, retriable=True))
        held.state = "telling"
        self._budget.give_back(held.job.job)
        held.computed.set()
        self.balance()

    def drop(self, job: str) -> None:
        """Stop it, let go of its blocks, ack its message. Fine when unknown."""
        held = self._held.get(job)
        if held is None:
            return
        if held.state != "asking":
            self._executor.stop(job)
        if held.state != "held":
            held.delivery.ack()
        self._forget(held)

    def _forget(self, held: HeldPrefill) -> None:
        held.state = "gone"
        self._held.pop(held.job.job, None)
        self._budget.give_back(held.job.job)
        held.computed.set()
        self.balance()

    def fail_all(self, why: str) -> None:
        """The engine is dead: nothing of it can be fetched any more."""
        for held in list(self._held.values()):
            if held.state in ("asking", "running"):
                self._refuse(held, why)
            elif held.state == "held":
                self.drop(held.job.job)

    def check(self, job: str) -> PrefillState:
        """How a job stands."""
        held = self._held.get(job)
        if held is None:
            return PrefillState(state="unknown")
        if held.answer is None or held.answer.params is None:
            return PrefillState(state="running")
        now = self._loop.time()
        if self._leaving:
            return PrefillState(state="held", left_s=max(0.0, held.promised_until_s - now))
        held.promised_until_s = min(held.kept_until_s, now + PROMISED_S)
        return PrefillState(state="held", left_s=max(0.0, held.kept_until_s - now))
