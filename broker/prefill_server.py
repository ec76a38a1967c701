"""The prefill worker's side of a KV transfer: pulls jobs within its token budget, has them computed, and keeps each answer.

The budget limits jobs by the tokens to compute, not by their number: a worker with ten short prompts has computed them before
another one has read half of a long prompt. Messages do not announce their size, so the next one is assumed to be like the
recent ones. While there is room at least one is requested, because a prompt larger than the whole budget must be taken by some
worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Protocol

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, encode
from headrace.broker.dead_letters import FailedDeliveries, dead_letter, note_failure
from headrace.broker.errors import BrokerError, WireError
from headrace.broker.membership.members import Members
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.prefill import PrefillDone, PrefillJob, PrefillState, PrefillTaken, PrefillVerdict
from headrace.broker.protocol.run import follow
from headrace.broker.spill import fetch_payload
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import NoResponder, NotConnected, RequestTimeout
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import ConsumerSpec, Delivery, PullLoop
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import prefill_consumer

RECENT = 0.2  # weight of a new job in the running mean
MOST_CREDIT = 16


class TokenBudget:
    """The tokens that a worker has still to compute. Beyond `limit` no more jobs are asked for."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a token budget must be 1 or more, got {limit}")
        self.limit = limit
        self.used = 0
        self._jobs: dict[str, int] = {}
        self._mean = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    def reserve(self, job: str, tokens: int) -> None:
        self.release(job)
        tokens = max(tokens, 1)
        self._jobs[job] = tokens
        self.used += tokens
        self._mean = tokens if not self._mean else (1 - RECENT) * self._mean + RECENT * tokens

    def release(self, job: str) -> None:
        self.used -= self._jobs.pop(job, 0)

    @property
    def credit(self) -> int:
        left = self.limit - self.used
        if left <= 0:
            return 0
        return max(1, min(MOST_CREDIT, int(left / self._mean))) if self._mean else 1


# A prefill job that a worker has taken: its states with the transitions between them, and what the worker knows of it.
#
# Everything that changes the state of a job stands in this file, and nothing outside it assigns `HeldPrefill.state`; an
# illegal transition raises, because the caller has a bug.
#
#     ASKING ──start──> RUNNING ──finish──> TELLING ──accept──> HELD
#        │                 │                  ^  ^ │
#        └────refuse───────┴────────refuse────┘  └─┘ refuse
#
#     each of these four ──forget──> GONE
#
# * `ASKING`: the payload is fetched, and the decode worker is asked where the job is not fresh. * `TELLING`: there is an
# answer, which is on its way to the decode worker. A worker that leaves replaces it by a refusal. * `HELD`: the answer was
# accepted and its message acked. The engine keeps the blocks until they are fetched or expire.


class HeldState(StrEnum):
    """The state of a prefill job. The values are what operators see, behind `prefill_`."""

    ASKING = "asking"
    RUNNING = "running"
    TELLING = "telling"
    HELD = "held"
    GONE = "gone"


TRANSITIONS: dict[HeldState, frozenset[HeldState]] = {
    HeldState.ASKING: frozenset({HeldState.RUNNING, HeldState.TELLING, HeldState.GONE}),
    HeldState.RUNNING: frozenset({HeldState.TELLING, HeldState.GONE}),
    HeldState.TELLING: frozenset({HeldState.TELLING, HeldState.HELD, HeldState.GONE}),
    HeldState.HELD: frozenset({HeldState.GONE}),
    HeldState.GONE: frozenset(),
}


@dataclass(slots=True, eq=False)
class HeldPrefill:
    job: PrefillJob
    delivery: Delivery
    state: HeldState = HeldState.ASKING
    started_s: float = 0.0
    kept_until_s: float = 0.0  # the engine keeps the computed blocks until then
    asked_s: float = 0.0  # the last question to the decode worker
    promised_until_s: float = 0.0  # the decode worker was promised the blocks until then, and may be fetching them
    answer: PrefillDone | None = None
    computed: asyncio.Event = field(default_factory=asyncio.Event)  # set once there is an answer, or none will come

    def start(self, now_s: float) -> None:
        self.state = follow(TRANSITIONS, self.state, HeldState.RUNNING)
        self.started_s = now_s

    def finish(self, answer: PrefillDone, *, kept_until_s: float) -> None:
        """Keep the engine's answer until it is sent to the decode worker."""
        self.state = follow(TRANSITIONS, self.state, HeldState.TELLING)
        self.answer = answer
        self.kept_until_s = kept_until_s
        self.computed.set()

    def refuse(self, answer: PrefillDone) -> None:
        self.state = follow(TRANSITIONS, self.state, HeldState.TELLING)
        self.answer = answer
        self.computed.set()

    def accept(self, now_s: float) -> None:
        """Keep the blocks: the decode worker has taken the answer."""
        self.state = follow(TRANSITIONS, self.state, HeldState.HELD)
        self.asked_s = now_s

    def forget(self) -> None:
        self.state = follow(TRANSITIONS, self.state, HeldState.GONE)
        self.computed.set()

    @property
    def gone(self) -> bool:
        return self.state is HeldState.GONE


# The prefill worker's side of a hand-over: pulls jobs within its token budget, has them computed, keeps each answer until it
# is settled.
#
# The decode worker owns the request. So this side starts at once where a job is fresh, asks first where it is not, and stops
# whatever the decode worker calls stale. A decode worker that is gone, by a fresh read of its lease, wants nothing more. The
# message of a job is acked when its answer has been taken, so a prefill worker that dies leaves the job for the next one.

log = structlog.get_logger()

FRESH_S = 1.0  # a younger job of a first delivery is started without a question
POLL_S = 0.05
PROMISED_S = 2.0  # a decode worker that asks before it fetches is promised the blocks for so long, also by a leaving worker
LATE_S = 2.0  # so long past its deadline a job is stopped, although its decode worker has not said that it may be
ASK_AGAIN_S = 2.0  # after so long the decode worker is asked again about held blocks, because its drop may have got lost


class PrefillExecutor(Protocol):
    """Computes prompts. All calls are synchronous and come on the event loop."""

    def uncached(self, job: PrefillJob) -> int:
        """Estimate the tokens that the engine will have to compute for this job."""

    def start(self, job: PrefillJob, payload: bytes, finished: Callable[[PrefillDone], None]) -> None:
        """Begin to compute. `finished` is called once at the end."""

    def stop(self, job: str) -> None:
        """Abort a job, or release its blocks; fine when unknown. `finished` is then not called for it."""

    @property
    def lease_s(self) -> float:
        """The seconds for which the engine keeps blocks that are not fetched."""

    @property
    def address(self) -> str:
        """The address of the engine for a rendezvous."""


class PrefillServer:
    def __init__(
        self,
        deps: WorkerDeps,
        members: Members,
        lease: LeaseKeeper,
        executor: PrefillExecutor,
        *,
        pool: str,
        worker: str,
        may_take: Callable[[], bool],
    ) -> None:
        """`may_take`: the lease is held, the role is `prefill`, and the worker is not leaving that role."""
        self._messaging = deps.messaging
        self._subjects = deps.subjects
        self._timing = deps.timing
        self._wall = deps.wall
        self._members = members
        self._lease = lease
        self._executor = executor
        self._pool = pool
        self._worker = worker
        self._may_take = may_take
        self._budget = TokenBudget(deps.settings.prefill_budget_tokens)
        self._loop = asyncio.get_running_loop()
        self._held: dict[str, HeldPrefill] = {}
        self._leaving = False
        self._tasks = TaskScope()
        self._failures = FailedDeliveries(deps.messaging, deps.subjects, pool=pool, kind="prefill_job", wall=deps.wall)
        self._own = prefill_consumer(deps.subjects, pool, worker, deps.secret)
        self._specs = (self._own, prefill_consumer(deps.subjects, pool, secret=deps.pool_secret))
        # made without logins, or by an earlier version: the stream takes one consumer with its filter
        self._guessable = deps.subjects.prefill_consumer(pool) if deps.pool_secret else ""
        self._pulls = [self._pull(spec) for spec in self._specs]

    def _pull(self, spec: ConsumerSpec) -> PullLoop:
        ensure = partial(self._messaging.ensure_consumer, spec)
        on_delivery = self._failures.guard(self._on_delivery, after=self.balance)
        return self._messaging.pull(spec.stream, spec.name, on_delivery, on_missing=ensure)

    async def run(self) -> None:
        async with self._tasks:
            for pull in self._pulls:
                self._tasks.spawn(pull.run())
            self._tasks.spawn(self._tend())

    def balance(self) -> None:
        wanted = self._budget.credit if self._may_take() else 0
        for pull in self._pulls:
            if pull.credit < wanted or (pull.credit and not wanted):
                pull.add_credit(wanted - pull.credit)

    def __len__(self) -> int:
        return len(self._held)

    def states(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for held in self._held.values():
            name = f"prefill_{held.state.value}"
            counts[name] = counts.get(name, 0) + 1
        return counts

    async def leave(self, grace_s: float) -> None:
        """Finish, wait until computed blocks are fetched, and refuse what the grace period left over.

        Promised blocks are kept, also where the answer is not confirmed: the decode worker may have it, and be fetching them.
        `may_take` must be false meanwhile. The worker may come back to this role afterwards.
        """
        self.balance()
        deadline = self._loop.time() + grace_s
        while self._held and self._loop.time() < deadline:
            await asyncio.sleep(POLL_S)
        for held in list(self._held.values()):
            if held.state is not HeldState.HELD and held.promised_until_s <= self._loop.time():
                self._refuse(held, "this worker leaves")
        settled_by = self._loop.time() + self._timing.rpc_timeout_s
        while any(held.state is HeldState.TELLING for held in self._held.values()) and self._loop.time() < settled_by:
            await asyncio.sleep(POLL_S)
        self._leaving = True
        while any(held.promised_until_s > self._loop.time() for held in self._held.values()):
            await asyncio.sleep(POLL_S)
        for job in list(self._held):
            self.drop(job)
        self._leaving = False

    async def ensure_consumers(self) -> None:
        """Make the consumers before the first pull; a pull makes its own again when it is missing. Raises JetStreamError."""
        if self._guessable:
            await self._messaging.delete_consumer(self._own.stream, self._guessable)
        for spec in self._specs:
            await self._messaging.ensure_consumer(spec)

    async def forget_consumer(self) -> None:
        """Delete the consumer of this worker's own jobs, which it reads no more. Raises JetStreamError."""
        await self._messaging.delete_consumer(self._own.stream, self._own.name)

    async def _tend(self) -> None:
        """Extend claims, and drop blocks that have expired, jobs that are late, and those of decode workers that are gone.

        A late job may be one whose drop got lost, and in a rendezvous its engine would go on waiting for the other one.
        """
        while True:
            await asyncio.sleep(self._timing.ack_wait_s / 3)
            now, too_late = self._loop.time(), self._wall() - LATE_S
            absent: set[str] = set()
            for held in list(self._held.values()):
                if held.state is HeldState.HELD:
                    if held.kept_until_s <= now:
                        log.warning("prefill.never_fetched", request_id=held.job.id, job=held.job.job, decode=held.job.decode)
                        metrics.PREFILL_JOBS.labels("never_fetched").inc()
                        self.drop(held.job.job)
                        continue
                    if now > held.asked_s + ASK_AGAIN_S and held.answer is not None:
                        held.asked_s = now
                        asking = self._ask_again(held, held.answer)
                        self._tasks.spawn_guarded(asking, lambda error: note_failure("prefill_job", error))
                elif held.answer is None and held.job.deadline <= too_late:
                    log.warning("prefill.late", request_id=held.job.id, job=held.job.job, decode=held.job.decode)
                    metrics.PREFILL_JOBS.labels("deadline").inc()
                    self.drop(held.job.job)
                    continue
                elif self._lease.held:
                    held.delivery.progress()
                if not self._members.worker_live(self._pool, held.job.decode):
                    absent.add(held.job.decode)
            for decode_worker in absent:
                if await self._members.worker_gone(self._pool, decode_worker):
                    self._drop_all_of(decode_worker)
            self.balance()

    def _drop_all_of(self, decode_worker: str) -> None:
        """Drop all but promised blocks: the decode worker may only have lost its lease, and be fetching them."""
        now = self._loop.time()
        for held in list(self._held.values()):
            if held.job.decode != decode_worker or held.promised_until_s > now:
                continue
            metrics.PREFILL_JOBS.labels("decode_gone").inc()
            self.drop(held.job.job)

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
        if known is not None:  # a redelivery of a job that is here
            known.delivery = delivery
            if known.state is HeldState.HELD:
                delivery.ack()
        elif not self._may_take() or not self._tasks.is_open:
            delivery.nak()
        elif job.deadline <= self._wall():
            metrics.PREFILL_JOBS.labels("deadline").inc()
            delivery.ack()
        else:
            held = self._held[job.job] = HeldPrefill(job, delivery)
            self._budget.reserve(job.job, self._executor.uncached(job))
            self._tasks.spawn_guarded(self._serve(held), lambda error: self._failed(held, error))
        self.balance()

    def _failed(self, held: HeldPrefill, error: Exception) -> None:
        """Give up a job for a reason that no check has foreseen. Its decode worker computes the prompt."""
        self._failures.bury(held.delivery, error)
        if not held.gone:
            self.drop(held.job.job)

    async def _ask_again(self, held: HeldPrefill, answer: PrefillDone) -> None:
        await self._ask(held, answer, again=False)

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
        if held.answer.fault is not None or held.answer.params is None:  # no blocks are kept
            self._forget(held)
        else:
            held.accept(self._loop.time())

    async def _start(self, held: HeldPrefill) -> bool:
        """Fetch the payload and begin. Returns False if the job is gone, True also for a refusal that is still unsent."""
        try:
            payload = await fetch_payload(
                self._messaging, self._subjects, held.job, wanted=lambda: held.state is HeldState.ASKING
            )
        except BrokerError as error:
            if held.state is HeldState.ASKING:
                self._refuse(held, str(error))
        if held.state is not HeldState.ASKING:
            return not held.gone
        held.start(self._loop.time())
        self._executor.start(held.job, payload, self.finished)
        return True

    async def _ask(self, held: HeldPrefill, what: PrefillTaken | PrefillDone, *, again: bool = True) -> bool:
        """Ask the decode worker until it has answered, or is gone. Returns True for `go`; on `stale` the job is dropped."""
        subject = self._subjects.control(held.job.decode)
        data = encode(what)
        while not held.gone:
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
                    return not held.gone
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

    def finished(self, done: PrefillDone) -> None:
        held = self._held.get(done.job)
        if held is None or held.state is not HeldState.RUNNING:
            return
        metrics.PREFILL_JOBS.labels("computed" if done.fault is None else "failed").inc()
        held.finish(done, kept_until_s=self._loop.time() + self._executor.lease_s)
        self._budget.release(done.job)
        self.balance()

    def _refuse(self, held: HeldPrefill, why: str) -> None:
        self._executor.stop(held.job.job)
        metrics.PREFILL_JOBS.labels("refused").inc()
        fault = JobFault("prefill_refused", why, retriable=True)
        held.refuse(PrefillDone(job=held.job.job, worker=self._worker, fault=fault))
        self._budget.release(held.job.job)
        self.balance()

    def drop(self, job: str) -> None:
        held = self._held.get(job)
        if held is None:
            return
        if held.state is not HeldState.ASKING:
            self._executor.stop(job)
        if held.state is not HeldState.HELD:
            held.delivery.ack()
        self._forget(held)

    def _forget(self, held: HeldPrefill) -> None:
        held.forget()
        self._held.pop(held.job.job, None)
        self._budget.release(held.job.job)
        self.balance()

    def fail_all(self, why: str) -> None:
        """Refuse what is not computed and drop what is held: the engine is dead, and no block can be fetched."""
        for held in list(self._held.values()):
            if held.state in (HeldState.ASKING, HeldState.RUNNING):
                self._refuse(held, why)
            elif held.state is HeldState.HELD:
                self.drop(held.job.job)

    def check(self, job: str) -> PrefillState:
        """Answer a decode worker's question about a job. Held blocks are promised to it for `PROMISED_S`."""
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
