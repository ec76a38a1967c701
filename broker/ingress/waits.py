"""Requests that wait at their ingress: for a broker that is away, and for a worker where there is none."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.ingress.requests import RequestOwner
from headrace.broker.jobs import Job
from headrace.broker.membership.members import Members
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.requests import Envelope
from headrace.broker.protocol.judge import Judge
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Messaging, PubAck

log = structlog.get_logger()

MOST = 1000  # requests that are held at once; more are refused, as all were without this


class BrokerWait:
    def __init__(self, away: Callable[[], bool], *, longest_s: float) -> None:
        """`away` returns whether the broker is away and may be back soon. `longest_s`: 0 holds no request."""
        self.longest_s = longest_s
        self._away = away
        self._changed = asyncio.Event()
        self._held = 0

    def back(self) -> None:
        """Look again whether the broker can be used. To be called after a reconnection, and when the lease is held again."""
        self._changed.set()

    def enter(self, why: str) -> bool:
        """Begin to hold a request, which must `leave` later. Returns False if too many are held: it is then refused."""
        if self._held >= MOST:
            metrics.BROKER_AWAITED.labels("too_many").inc()
            return False
        if not self._held:
            log.info("broker.awaited", longest_s=self.longest_s, why=why)
        self._held += 1
        metrics.AWAITING_BROKER.set(self._held)
        return True

    def leave(self, outcome: str) -> None:
        self._held -= 1
        metrics.AWAITING_BROKER.set(self._held)
        metrics.BROKER_AWAITED.labels(outcome).inc()

    async def hold(self, longest_s: float) -> None:
        longest_s = min(longest_s, self.longest_s)
        if longest_s <= 0 or not self._away():
            return
        if not self.enter("not connected, or the lease is not held"):
            return
        outcome = "away"
        try:
            async with asyncio.timeout(longest_s):
                while self._away():
                    self._changed.clear()
                    await self._changed.wait()
            outcome = "back"
        except TimeoutError:
            pass
        finally:
            self.leave(outcome)


# Holds requests that came while no worker could take them, until one can or their patience is over.
#
# Such a request is stored in its queue like any other, so routers have it in their windows and place it as soon as a worker
# is there. The ingress alone decides how long it may wait for that, because it is the judge and knows the setting. A request
# that is let go was never started here; its copy is removed from the queue, where it would count against the cap until its
# TTL.

CHECK_S = 0.25
LEAST_NAP_S = 0.001
RETRY_AFTER_S = 1.0

Outcome = Literal["worker", "no_worker", "ended"]


class _Held(NamedTuple):
    id: str
    stored: PubAck
    since_s: float
    until_s: float


class _Wanted(NamedTuple):
    """The worker that held requests wait for: one of the pool, with the adapter unless that is empty."""

    pool: str
    model: str
    adapter: str


class WorkerWait:
    def __init__(self, messaging: Messaging, members: Members, judge: Judge, owner: RequestOwner, *, longest_s: float) -> None:
        """`longest_s`: how long a request may be held; it is never held beyond its deadline. 0: none may be."""
        self.longest_s = longest_s
        self._messaging = messaging
        self._members = members
        self._judge = judge
        self._owner = owner
        self._held: dict[_Wanted, dict[str, _Held]] = {}
        self._leftovers: deque[_Held] = deque()  # bounded by the open requests of the ingress
        self._some = asyncio.Event()
        self._left_over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        members.on_change(self._on_members)

    def __len__(self) -> int:
        return sum(len(group) for group in self._held.values())

    def served(self, job: Job) -> bool:
        return bool(self._members.having(job.card.pool, job.adapter))

    def answerable(self, job: Job) -> bool:
        return self._members.answerable(job.card.pool, job.adapter)

    def hold(self, job: Job, stored: PubAck, since_s: float) -> None:
        """Begin to hold a request that was submitted at `since_s`, unless a worker has come meanwhile.

        Where none may be held, a request is only stored while a worker is there.  One whose worker left before the ack is then
        like one whose worker left after it: it has the time until its deadline.
        """
        if not self.longest_s or self.served(job) or self._judge.get(job.id) is None:
            return
        wanted = _Wanted(job.card.pool, job.card.model, job.adapter)
        group = self._held.setdefault(wanted, {})
        if not group:
            log.warning("requests.held", **wanted._asdict(), longest_s=self.longest_s)
        group[job.id] = _Held(job.id, stored, since_s, since_s + min(self.longest_s, job.deadline_s))
        metrics.HELD.set(len(self))
        self._some.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self._remove_leftovers())

    def _on_members(self) -> None:
        for wanted in list(self._held):
            if self._members.having(wanted.pool, wanted.adapter):
                group = self._held.pop(wanted)
                for held in group.values():
                    self._note(held, "worker")
                log.info("requests.released", **wanted._asdict(), requests=len(group))
                metrics.HELD.set(len(self))

    async def _watch(self) -> None:
        while True:
            await self._some.wait()
            next_s = self._check(self._loop.time())
            if next_s is None:
                self._some.clear()
            else:
                await asyncio.sleep(min(CHECK_S, max(LEAST_NAP_S, next_s - self._loop.time())))

    def _check(self, now_s: float) -> float | None:
        """Let go whose time is up, and forget those that ended or began by themselves. Return when the next time is up."""
        for wanted, group in list(self._held.items()):
            refused = 0
            for held in list(group.values()):
                record = self._judge.get(held.id)
                if record is not None and record.run is None and (now_s < held.until_s or self._comes(wanted)):
                    continue
                del group[held.id]
                if record is None:
                    self._leave(held, "ended")
                elif record.run is not None:  # a worker whose lease is not known here yet
                    self._note(held, "worker")
                else:
                    self._refuse(wanted, held, now_s)
                    refused += 1
            if refused:
                log.warning("requests.not_served", **wanted._asdict(), requests=refused)
            if not group:
                del self._held[wanted]
        metrics.HELD.set(len(self))
        return min((held.until_s for group in self._held.values() for held in group.values()), default=None)

    def _comes(self, wanted: _Wanted) -> bool:
        return self._members.waking(wanted.pool, wanted.adapter)

    def _refuse(self, wanted: _Wanted, held: _Held, now_s: float) -> None:
        name = wanted.adapter or wanted.model
        message = f"model {name!r} has no ready worker, and none came in {now_s - held.since_s:.1f} s"
        fault = JobFault("no_worker", message, retriable=True, retry_after_s=RETRY_AFTER_S)
        self._owner.end(held.id, fault, cause="no_worker")
        self._leave(held, "no_worker")

    def _leave(self, held: _Held, outcome: Outcome) -> None:
        self._note(held, outcome)
        self._leftovers.append(held)
        self._left_over.set()

    def _note(self, held: _Held, outcome: Outcome) -> None:
        metrics.HELD_ENDED.labels(outcome).inc()
        metrics.HELD_S.observe(self._loop.time() - held.since_s)

    async def _remove_leftovers(self) -> None:
        while True:
            await self._left_over.wait()
            while self._leftovers:
                held = self._leftovers.popleft()
                try:
                    await self._remove(held)
                except JetStreamError as error:  # its TTL, or the worker that asks this judge about it, removes it later
                    log.debug("request.left_in_queue", request_id=held.id, error=str(error))
            self._left_over.clear()

    async def _remove(self, held: _Held) -> None:
        """Delete the stored copy if it is still there. The message is read first: its stream may have been made again."""
        stored = await self._messaging.get_message(held.stored.stream, held.stored.seq)
        try:
            if stored is not None and decode(Envelope, stored.data).id == held.id:
                await self._messaging.delete_message(held.stored.stream, held.stored.seq)
        except WireError as error:
            log.debug("request.left_in_queue", request_id=held.id, error=str(error))
