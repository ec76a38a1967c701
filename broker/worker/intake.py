"""The intake of one worker, all that decides its credit: its queue, the requests that it places on itself, preemption.

A worker places requests on itself while no router lease is live in its pool.  Never beyond its free slots, and through WORK
exactly as a router would: publish, event, then ack.  On the `prioritized` consumers of REQ it asks at priority 9: a router that
comes back is served first.

Several messages may be on their way at once.  One at a time, as the protocol was first written, costs two round trips to the
server per request in sequence, which measured 390 requests/s with both cores three quarters idle; nothing in the
protocol's safety rests on the order of placements.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode_request, job_headers, log_ids, parse_job_headers, parse_prefill_header
from headrace.broker.dead_letters import FailedDeliveries, dead_letter
from headrace.broker.errors import WireError
from headrace.broker.membership.mover import message_ttl_s, rendezvous_first
from headrace.broker.messages.control import HistoryEntry
from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.requests import HEADER_KEPT, HEADER_RANK, Envelope
from headrace.broker.prefill_server import PrefillServer
from headrace.broker.protocol.preemption import Yielding, blocks_of, choose, lost_tokens, may_yield
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.worker.presence import Presence
from headrace.broker.worker.reports import Reports
from headrace.broker.worker.runs import Admission, WorkerRuns
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge, QueueFull
from headrace.jetstream.ports import Delivery, PullLoop
from headrace.jetstream.subjects import BATCH_CLASSES, REQUEST_CLASSES, RequestClass
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import request_consumer, work_consumer

RETURNED_AT_ONCE = 8  # requests that a worker which serves none takes at once, to move them
WORKER_PRIORITY = 9
ADAPTER_WAIT_S = 10.0  # as long a request waits in the queue for a worker with its adapter, before this one refuses it
PLACED_FORGOTTEN_S = 10.0  # after so long a placed request that never arrived gives its slot back
LOOK_S = 0.1
SPARE_PART = 64  # of the KV blocks, one in so many stays free for answers of interactive runs that grow

log = structlog.get_logger()


class Preemption:
    """Has batch runs make way for interactive ones.

    The message of a preempted run is moved, as in a drain, to class `rb`: the next attempt resumes from the run's tokens.
    """

    def __init__(self, deps: WorkerDeps, presence: Presence, runs: WorkerRuns) -> None:
        self._most_moves = deps.settings.max_preemptions
        self._presence = presence
        self._runs = runs
        self._table = runs.table

    @property
    def slots(self) -> int:
        return sum(run.envelope.choices for run in self._candidates()) if self._table.batch else 0

    def yielding(self) -> Yielding:
        if not self._table.batch:
            return Yielding()
        found = [run for run in self._candidates() if self._runs.executor.resumable(run)]
        size = self._presence.member.block_size
        slots, blocks = sum(run.envelope.choices for run in found), sum(blocks_of(run, size) for run in found)
        return Yielding(len(found), slots, blocks, found)

    def make_room(self, arrived: Run) -> None:
        """Preempt what this new run needs. To be called before it is admitted; a batch run may have to leave itself."""
        if not self._table.batch:
            return
        over = self._table.sequences - self._runs.slots
        if over > 0:
            over -= sum(run.envelope.choices for run in self._table if run.stopping or run.state is RunState.ENDED)
        self._preempt(slots=over, blocks=0 if arrived.yields_place else self._missing_blocks(arrived))

    async def run(self) -> None:
        """Keep some KV blocks free beside interactive runs, until cancelled: one batch run at a time makes way for them."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._table.batch and len(self._table) > len(self._table.batch):
                load = self._load()
                if load.blocks_total and load.blocks_total - load.blocks_used < load.blocks_total // SPARE_PART:
                    self._preempt(slots=0, blocks=1)

    def _candidates(self) -> list[Run]:
        if not self._presence.taking or self._table.on_trial:
            return []
        return [run for run in self._table.batch if may_yield(run, self._most_moves)]

    def _missing_blocks(self, run: Run) -> int:
        load, size = self._load(), self._presence.member.block_size
        if not load.blocks_total or not size:
            return 0
        return blocks_of(run, size) + 1 - (load.blocks_total - load.blocks_used)

    def _load(self) -> LoadReport:
        worker, epoch = self._presence.worker, self._presence.member.epoch
        return self._runs.executor.load(LoadReport(worker=worker, epoch=epoch, n=0, at=0.0, slots=0, running=0, waiting=0))

    def _preempt(self, *, slots: int, blocks: int) -> None:
        if slots <= 0 and blocks <= 0:
            return
        size, resumable = self._presence.member.block_size, self._runs.executor.resumable
        for run in choose(self._candidates(), slots=slots, blocks=blocks, block_size=size, resumable=resumable):
            lost = lost_tokens(run)
            log.info("run.preempted", **log_ids(run.envelope), attempt=run.attempt, tokens=run.made, lost=lost)
            metrics.PREEMPTED.inc()
            metrics.PREEMPTED_TOKENS.inc(lost)
            self._runs.move_soon(run, reason="preempted")


class Intake:
    """Pulls WORK for one worker, and REQ while it places requests on itself, which `places` can switch off, for tests."""

    def __init__(
        self,
        deps: WorkerDeps,
        presence: Presence,
        runs: WorkerRuns,
        admission: Admission,
        preemption: Preemption,
        reports: Reports,
        prefill: PrefillServer | None = None,
    ) -> None:
        self._deps = deps
        self._presence = presence
        self._runs = runs
        self._table = runs.table
        self._admission = admission
        self._preemption = preemption
        self._reports = reports
        self._prefill = prefill
        self.places = deps.settings.self_place
        self._due = False
        self._asking = False  # requests are open: most workers have a router, and nothing to ask for
        self._placed: dict[tuple[str, int], float] = {}  # id and attempt → when the worker placed it on itself
        self._holding: dict[Delivery, None] = {}
        self._tasks = TaskScope()
        self._loop = asyncio.get_running_loop()
        messaging, subjects, pool = deps.messaging, deps.subjects, presence.pool
        self._bury_work = FailedDeliveries(messaging, subjects, pool=pool, kind="work", wall=deps.wall).bury
        self._failures = FailedDeliveries(messaging, subjects, pool=pool, kind="request", wall=deps.wall)
        self._consumer = work_consumer(subjects, pool, presence.worker, deps.secret)
        # A janitor that took this worker for dead has removed its consumer: it is made again when the worker is back.
        self._work = messaging.pull(self._consumer.stream, self._consumer.name, self._on_work, on_missing=self.ensure_consumers)
        self._requests: dict[RequestClass, PullLoop] = {}
        for name in REQUEST_CLASSES:
            consumer = request_consumer(subjects, pool, name)
            self._requests[name] = messaging.pull(
                consumer.stream,
                consumer.name,
                self._failures.guard(partial(self._on_request, request_class=name), after=self.balance),
                priority=WORKER_PRIORITY,
                on_missing=partial(messaging.ensure_consumer, consumer),
            )
        presence.on_change(self.balance)

    async def ensure_consumers(self) -> None:
        """Make the pool's consumers of REQ, the worker's own of WORK and, for a prefill worker, of PREFILL."""
        deps = self._deps
        requests = [request_consumer(deps.subjects, self._presence.pool, name) for name in REQUEST_CLASSES]
        for consumer in (*requests, self._consumer):
            await deps.messaging.ensure_consumer(consumer)
        if self._prefill is not None and not self._presence.serves:
            await self._prefill.ensure_consumers()

    async def forget_consumers(self) -> None:
        await self._deps.messaging.delete_consumer(self._consumer.stream, self._consumer.name)
        if self._prefill is not None:
            await self._prefill.forget_consumer()

    async def run(self) -> None:
        async with self._tasks:
            for pull in (self._work, *self._requests.values()):
                self._tasks.spawn(pull.run())
            self._tasks.spawn(self._hold())
            self.balance()

    async def stop(self) -> None:
        """Take nothing more in. The tasks of `run` finish what is being placed."""
        for pull in (self._work, *self._requests.values()):
            await pull.stop()

    # -- credit ------------------------------------------------------------------------------------------------

    def balance(self) -> None:
        """Ask for as much work as there is room for. To be called whenever a slot or a permission changes.

        Beside batch runs, which are looked at one by one, this is done once per turn of the event loop.
        """
        if not self._table.batch:
            self._ask_for_work()
        elif not self._due:
            self._due = True
            self._loop.call_soon(self._ask_for_work)
        if self._asking or not self._presence.members.has_router(self._presence.pool):
            self._ask_for_requests()

    def _ask_for_work(self) -> None:
        """Count the slots of batch runs that would make way as free ones."""
        self._due = False
        presence, work, wanted = self._presence, self._work, 0
        if presence.taking and presence.lease.held:
            wanted = max(0, self._runs.free_slots + (self._preemption.slots if self._table.batch else 0))
        if not presence.serves:
            wanted = min(wanted, RETURNED_AT_ONCE)
        credit = work.credit
        if credit != wanted:
            work.add_credit(wanted - credit)

    def _ask_for_requests(self) -> None:
        """Leave open requests open when only the room shrinks: withdrawing them costs more than giving back what they bring."""
        if not self._may_place():
            if self._asking:
                self._asking = False
                for pull in self._requests.values():
                    pull.add_credit(-pull.credit)
            return
        self._asking = True
        most = self._deps.settings.self_place_burst
        for_batch = max(0, min(self._room("batch"), most))
        for_others = max(0, min(self._room("std"), most))  # they may take the place of batch runs
        for request_class, pull in self._requests.items():
            wanted = for_batch if request_class in BATCH_CLASSES else for_others
            if pull.credit < wanted:
                pull.add_credit(wanted - pull.credit)

    def _room(self, request_class: RequestClass) -> int:
        room = 0 if self._table.on_trial else self._runs.free_slots - len(self._placed)
        return room if request_class in BATCH_CLASSES else room + self._preemption.slots

    def _may_place(self) -> bool:
        """Return True while the lease is held, the worker takes requests, and no router lease is live in its pool."""
        presence = self._presence
        return (
            presence.serves
            and presence.taking
            and self.places
            and not presence.members.has_router(presence.pool)
            and presence.lease.held
        )

    # -- the worker's own queue ----------------------------------------------------------------------------------

    def _on_work(self, delivery: Delivery) -> None:
        try:
            held = self._take(delivery)
        except Exception as error:
            self._bury_work(delivery, error)
            held = True  # or it was: its credit is free again
        if held:
            self._presence.changed()

    def _take(self, delivery: Delivery) -> bool:
        """Hold a message, or give it back and return False."""
        presence, table = self._presence, self._table
        if (old := table.at(delivery.stream_seq)) is not None:
            if old.delivery.data == delivery.data:
                old.delivery = delivery  # delivered again: the last one is to be acknowledged
                return True
            log.warning("work.displaced", **log_ids(old.envelope), seq=old.seq)
            self._runs.abandon(old)
        if not presence.taking or not presence.lease.held:
            delivery.nak(self._deps.timing.retry_s)
            return False
        if not presence.serves:
            self._runs.return_unserved(delivery)
            return False
        if (run := self._read(delivery)) is not None:
            table.add(run)
            self._placed.pop((run.id, run.attempt), None)
            try:
                self._preemption.make_room(run)
                if not run.stopping:
                    self._admission.admit(run)
            except Exception as error:
                self._admission.failed(run, error)
        return True

    def _read(self, delivery: Delivery) -> Run | None:
        deps, headers = self._deps, delivery.headers
        try:
            envelope = decode_request(delivery.data)
            attempt, history = parse_job_headers(headers)
            decision = parse_prefill_header(headers)
        except WireError as error:
            metrics.MALFORMED.labels("work").inc()
            log.error("work.malformed", seq=delivery.stream_seq, error=str(error))
            dead_letter(deps.messaging, deps.subjects, self._presence.pool, delivery, str(error), wall=deps.wall)
            return None
        run = Run(envelope=envelope, attempt=attempt, history=history, run=deps.random_bits(64), delivery=delivery)
        run.prefill = decision
        run.kept = HEADER_KEPT in (headers or ())
        if self._presence.member.ranks > 1:
            run.rank = choose_rank(headers, self._table, ranks=self._presence.member.ranks)
        run.due_s = self._loop.time() + envelope.deadline - deps.wall()
        return run

    # -- requests that it places on itself -------------------------------------------------------------------------

    def _elsewhere(self, envelope: Envelope) -> str:
        """Choose a worker for a request whose adapter this one lacks, or which is too long for its context.

        Empty: this worker takes it, also to refuse it.
        """
        presence = self._presence
        if presence.usable(envelope.adapter) and _fits(presence.member, envelope):
            return ""
        having = [m for m in presence.members.having(presence.pool, envelope.adapter) if _fits(m, envelope)]
        return rendezvous_first(envelope.id, [m.worker for m in having if m.worker != presence.worker]) or ""

    def _waits(self, envelope: Envelope) -> bool:
        """Return whether no worker has the adapter of a request that may wait for one: its worker may be restarting."""
        return not self._presence.usable(envelope.adapter) and self._deps.wall() - envelope.created < ADAPTER_WAIT_S

    def _on_request(self, delivery: Delivery, *, request_class: RequestClass) -> None:
        deps, presence = self._deps, self._presence
        try:
            envelope = decode_request(delivery.data)
            attempt, history = parse_job_headers(delivery.headers)
        except WireError as error:
            metrics.MALFORMED.labels("request").inc()
            log.error("request.malformed", subject=delivery.subject, seq=delivery.stream_seq, error=str(error))
            dead_letter(deps.messaging, deps.subjects, presence.pool, delivery, str(error), wall=deps.wall)
            self.balance()
            return
        if envelope.id in self._runs.tombstones:
            delivery.ack()
        elif self._may_place() and (worker := self._elsewhere(envelope)):
            self._spawn(delivery, self._place(delivery, envelope, attempt, history, worker=worker))
        elif self._waits(envelope):
            delivery.nak(deps.timing.retry_s)
        elif self._room(request_class) < 1 or not self._may_place():
            delivery.nak()  # several classes were answered at once and the slot is taken: another worker may have one
        else:
            self._placed[envelope.id, attempt] = self._loop.time()
            self._spawn(delivery, self._place(delivery, envelope, attempt, history, worker=presence.worker))
        self.balance()

    def _spawn(self, delivery: Delivery, placing: Coroutine[Any, Any, None]) -> None:
        self._tasks.spawn_guarded(placing, lambda error: self._failures.bury(delivery, error))

    async def _place(
        self, delivery: Delivery, envelope: Envelope, attempt: int, history: list[HistoryEntry], *, worker: str
    ) -> None:
        deps, timing = self._deps, self._deps.timing
        self._holding[delivery] = None
        headers = job_headers(attempt, history)
        try:
            while True:
                try:
                    ack = await deps.messaging.publish(
                        deps.subjects.work(self._presence.pool, worker),
                        delivery.data,
                        headers=headers,
                        msg_id=f"{envelope.id}.{attempt}@{delivery.stream_seq}",
                        ttl_s=message_ttl_s(envelope.deadline, deps.wall(), timing.ttl_slack_s),
                        timeout_s=timing.publish_timeout_s,
                    )
                except QueueFull:
                    self._placed.pop((envelope.id, attempt), None)
                    delivery.nak(timing.retry_s)
                    return
                except PayloadTooLarge as error:  # its headers have grown beyond what the server takes
                    self._placed.pop((envelope.id, attempt), None)
                    self._failures.bury(delivery, error)
                    return
                except JetStreamError as error:  # unknown outcome: the same subject and id until it is known
                    log.warning("place.retry", **log_ids(envelope), attempt=attempt, error=str(error))
                    await asyncio.sleep(timing.retry_s)
                else:
                    break
            if ack.duplicate:
                self._placed.pop((envelope.id, attempt), None)
            else:
                metrics.PLACED.inc()
                if worker == self._presence.worker:
                    self._reports.add("placed", envelope.id, attempt, envelope.tokens)
            delivery.ack()
        finally:
            self._holding.pop(delivery, None)
            self.balance()

    async def _hold(self) -> None:
        """Extend the claims on REQ of what is still being placed, and forget placements that never arrived."""
        while True:
            await asyncio.sleep(self._deps.timing.ack_wait_s / 3)
            for delivery in self._holding:
                delivery.progress()
            now = self._loop.time()
            self._placed = {key: since for key, since in self._placed.items() if now - since <= PLACED_FORGOTTEN_S}
            self.balance()


def _fits(member: WorkerMember, envelope: Envelope) -> bool:
    return not member.max_model_len or envelope.tokens + max(envelope.max_tokens, 1) <= member.max_model_len


def choose_rank(headers: Mapping[str, str] | None, runs: Iterable[Run], *, ranks: int) -> int:
    """Return the rank for a new run, of an engine with several.

    It is the rank that a router has named. Without one, or if the engine does not have that rank (any more), it is the rank
    with the fewest runs.
    """
    named = headers.get(HEADER_RANK, "") if headers else ""
    if named.isdecimal() and int(named) < ranks:
        return int(named)
    if named:
        metrics.UNKNOWN_RANKS.inc()
        log.warning("work.unknown_rank", rank=named, ranks=ranks)
    counts = Counter(run.rank for run in runs)
    return min(range(ranks), key=lambda rank: counts[rank])
