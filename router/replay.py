"""Replay of recorded placements under another policy: records, a model of the workers' caches, and rebuilt indexes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from headrace.broker.codec import encode, unpack_u64, unpack_u64_array
from headrace.broker.messages.control import Routed
from headrace.broker.messages.events import JobEvent, LoadReport
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.router.errors import ReplayStalled, RouterError
from headrace.router.index.reader import KvEventReader, run_sliced
from headrace.router.index.snapshot import SnapshotStore, UnreadablePointer, restore
from headrace.router.index.types import TIERS, Tier
from headrace.router.index.view import Caches
from headrace.router.placement.scheduler import Scheduler
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Decision, Placement, Waiting, WorkerInfo
from headrace.router.session.window import HeldRequest


class PrefixCache:
    """Keeps blocks by recency. Those of a prompt are touched from the last to the first, so that the tail is evicted first."""

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._stored: dict[int, None] = {}  # since the last `changes`, and still here
        self._removed: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def match(self, chain: Sequence[int]) -> int:
        held = self._blocks
        for count, block in enumerate(chain):
            if block not in held:
                return count
        return len(chain)

    def touch(self, chain: Sequence[int]) -> None:
        held, stored, removed = self._blocks, self._stored, self._removed
        for block in reversed(chain):
            if block in held:
                held.move_to_end(block)
                continue
            held[block] = None
            if block in removed:
                del removed[block]
            else:
                stored[block] = None
        while len(held) > self._most:
            block, _ = held.popitem(last=False)
            if block in stored:
                del stored[block]
            else:
                removed[block] = None

    def changes(self) -> tuple[Sequence[int], Sequence[int]]:
        if not self._stored and not self._removed:
            return (), ()
        changed = list(self._stored), list(self._removed)
        self._stored, self._removed = {}, {}
        return changed


# Replay of recorded placements under another policy.
#
# The record says when each request came, what its blocks were and where it went. Both are played through the same model: one
# request after the other, every worker a cache with least-recently-used eviction, the caches at the start as the index says
# they were. So they differ only in the decisions of the policy; time, queues and the end of a request are left out of both.
# `headrace bench replay` models those.

SLOTS = 64
STEP_TOKENS = 8192
PATIENCE_S = 60.0
PAUSE_S = 0.01


class RerunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of placements. Balance is the most loaded worker over the mean."""

    requests: int
    hit_blocks: int
    hit_rate: float  # of blocks
    uncached_tokens: int
    balance_requests: float
    balance_uncached: float
    per_worker: dict[str, int]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A request that went to another worker. Hits are blocks of its prompt that the worker had."""

    id: str
    blocks: int
    recorded: str
    recorded_hit: int
    replayed: str
    replayed_hit: int


class Rerun(msgspec.Struct, frozen=True, kw_only=True):
    """The record, and the same requests under `policy`. `shed`: requests the policy refused, by reason."""

    policy: str
    workers: list[str]
    recorded: RerunOutcome
    replayed: RerunOutcome
    moved: int
    differences: list[Difference]
    shed: dict[str, int]


def rerun(
    records: Sequence[Routed],
    settings: SchedulerSettings,
    *,
    capacity: Mapping[str, int],
    held: Mapping[str, Mapping[Tier, bytes]] | None = None,
    seed: int = 0,
    differences: int = 20,
) -> Rerun:
    """Place the recorded requests again under another policy, and compare.

    `capacity`: blocks of each worker's cache; workers not named get the largest of them. `held`: blocks of each at the start.
    Raises ReplayStalled if the policy does not place a request although no worker is busy.
    """
    arrived = sorted(records, key=lambda record: record.at - record.waited_s)
    workers = sorted({record.worker for record in records} | capacity.keys())
    most = max(capacity.values(), default=1 << 30)
    chains = [unpack_u64(record.hashes) for record in arrived]
    before = _World(workers, capacity, most, held or {})
    recorded = [before.serve(record.worker, chain) for record, chain in zip(arrived, chains, strict=True)]
    after = _Policy(_World(workers, capacity, most, held or {}), settings, seed)
    replayed = [after.place(record, chain) for record, chain in zip(arrived, chains, strict=True)]
    moved = [
        Difference(
            id=record.id,
            blocks=len(chain),
            recorded=record.worker,
            recorded_hit=hit,
            replayed=other[0],
            replayed_hit=other[1],
        )
        for record, chain, hit, other in zip(arrived, chains, recorded, replayed, strict=True)
        if other is not None and other[0] != record.worker
    ]
    moved.sort(key=lambda difference: -abs(difference.replayed_hit - difference.recorded_hit))
    then = [(record.worker, hit) for record, hit in zip(arrived, recorded, strict=True)]
    return Rerun(
        policy=settings.policy,
        workers=workers,
        recorded=_outcome(arrived, chains, then, workers),
        replayed=_outcome(arrived, chains, replayed, workers),
        moved=len(moved),
        differences=moved[:differences],
        shed=dict(after.shed),
    )


class _World:
    def __init__(
        self, workers: Sequence[str], capacity: Mapping[str, int], most: int, held: Mapping[str, Mapping[Tier, bytes]]
    ) -> None:
        self.capacity = {worker: capacity.get(worker, most) for worker in workers}
        self.caches = {worker: PrefixCache(self.capacity[worker]) for worker in workers}
        for worker, tiers in held.items():
            if worker in self.caches:
                for tier in reversed(TIERS):  # what is on the device is the most recent
                    self.caches[worker].touch(unpack_u64_array(tiers.get(tier, b"")))

    def serve(self, worker: str, chain: Sequence[int]) -> int:
        cache = self.caches[worker]
        hit = cache.match(chain)
        cache.touch(chain)
        return hit


class _Policy:
    """Runs a scheduler whose workers are always idle when the next request comes."""

    def __init__(self, world: _World, settings: SchedulerSettings, seed: int) -> None:
        self.shed: Counter[str] = Counter()
        self._world = world
        self._view = Caches()
        self._scheduler = Scheduler(settings, self._view, name="replay", seed=seed)
        self._now_s = 0.0
        self._reports = 0
        for worker, cache in world.caches.items():
            self._view.add_worker(worker)
            capacity = world.capacity[worker]
            info = WorkerInfo(worker=worker, slots=SLOTS, blocks=capacity, block_size=0, step_tokens=STEP_TOKENS)
            self._scheduler.put_worker(info, 0.0)
            self._apply_changes(worker, cache)
            self._report(worker)

    def place(self, record: Routed, chain: Sequence[int]) -> tuple[str, int] | None:
        self._now_s += PAUSE_S
        request = Waiting(
            id=record.id,
            tokens=record.tokens,
            max_tokens=record.max_tokens,
            chain=chain,
            block_size=record.block_size,
            request_class=record.request_class,
            tenant=record.tenant,
            priority=record.priority,
            session=record.session,
            arrived_s=self._now_s,
        )
        shed = self._scheduler.offer(request, self._now_s)
        decision = shed if shed is not None else self._decision(request)
        if not isinstance(decision, Placement):
            self.shed[decision.code] += 1
            return None
        hit = self._world.serve(decision.worker, chain)
        self._ended(decision, record, hit)
        return decision.worker, hit

    def _decision(self, request: Waiting) -> Decision:
        until_s = self._now_s + PATIENCE_S
        while self._now_s < until_s:
            for decision in self._scheduler.decide(self._now_s):
                return decision
            wake_s = self._scheduler.next_wake_s(self._now_s)
            self._now_s = max(wake_s if wake_s is not None else until_s, self._now_s + PAUSE_S)
        raise ReplayStalled(f"request {request.id} is not placed although all workers are idle")

    def _ended(self, placement: Placement, record: Routed, hit: int) -> None:
        worker, uncached = placement.worker, max(0, record.tokens - hit * record.block_size)
        for kind in ("started", "prefilled", "settled"):
            self._scheduler.on_event(JobEvent(kind, record.id, record.attempt, worker, record.tokens, uncached), self._now_s)
        self._apply_changes(worker, self._world.caches[worker])
        self._report(worker)

    def _apply_changes(self, worker: str, cache: PrefixCache) -> None:
        stored, removed = cache.changes()
        self._view.apply(worker, removed={"device": removed}, stored={"device": stored}, now_s=self._now_s)

    def _report(self, worker: str) -> None:
        self._reports += 1
        report = LoadReport(
            worker=worker, epoch=0, n=self._reports, at=self._now_s, slots=SLOTS, running=0, waiting=0,
            blocks_total=self._world.capacity[worker], blocks_used=0,
        )  # fmt: skip
        self._scheduler.on_report(report, self._now_s)


def _outcome(
    records: Sequence[Routed],
    chains: Sequence[Sequence[int]],
    placed: Sequence[tuple[str, int] | None],
    workers: Sequence[str],
) -> RerunOutcome:
    requests: Counter[str] = Counter()
    uncached: Counter[str] = Counter()
    hits = 0
    for record, place in zip(records, placed, strict=True):
        if place is not None:
            worker, hit = place
            requests[worker] += 1
            hits += hit
            uncached[worker] += max(0, record.tokens - hit * record.block_size)
    blocks = sum(map(len, chains))
    return RerunOutcome(
        requests=requests.total(),
        hit_blocks=hits,
        hit_rate=hits / blocks if blocks else 0.0,
        uncached_tokens=uncached.total(),
        balance_requests=_balance(requests, workers),
        balance_uncached=_balance(uncached, workers),
        per_worker=dict(sorted(requests.items())),
    )


def _balance(load: Counter[str], workers: Sequence[str]) -> float:
    return max(load.values()) * len(workers) / load.total() if load.total() else 1.0


# Records of placements, from which another policy can be replayed later.
#
# They are sent without waiting for an ack: a lost record costs nothing, and waiting for one would delay a request.

MAX_HASHES = 2048  # 16 KiB a record at most
_HASH_BYTES = 8


class Recorder:
    """Sends the records of one router in one pool. `placed` is made for the `record` of a session."""

    def __init__(
        self, messaging: Messaging, subjects: Subjects, *, pool: str, router: str, wall: Callable[[], float] = time.time
    ) -> None:
        self._messaging = messaging
        self._subject = subjects.route(pool)
        self._router = router
        self._wall = wall

    def placed(self, held: HeldRequest, placement: Placement) -> None:
        head = held.head
        routed = Routed(
            at=self._wall(),
            id=head.id,
            attempt=held.attempt,
            router=self._router,
            worker=placement.worker,
            reason=placement.reason,
            tokens=head.tokens,
            max_tokens=head.max_tokens,
            uncached=placement.uncached,
            waited_s=placement.waited_s,
            predicted_ttft_s=placement.predicted_ttft_s,
            tenant=head.tenant,
            request_class=held.request_class,
            priority=head.priority,
            block_size=head.block_size,
            blocks=len(head.hashes) // _HASH_BYTES,
            hashes=head.hashes[: MAX_HASHES * _HASH_BYTES],
            adapter=head.adapter,
            session=head.session,
            prefill=placement.prefill,
            fleet=placement.fleet.fleet if placement.fleet is not None else "",
            fleet_reason=placement.fleet.reason if placement.fleet is not None else "",
            ttft_target_s=head.ttft_target_s,
            itl_target_s=head.itl_target_s,
        )
        try:
            self._messaging.send(self._subject, encode(routed))
        except PayloadTooLarge:  # of a server with a tiny limit
            return


log = structlog.get_logger(__name__)

READ_TIMEOUT_S = 30.0


class NotKept(RouterError):
    """The stream no longer has that part, or not yet."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """An index rebuilt from `source`. The last event applied has `seq` and was stored `at` (Unix time; 0: no event was read).

    `first_seq` and `last_seq` are those of the stream.
    """

    reader: KvEventReader
    caches: Caches
    seq: int
    at: float
    source: str
    replayed: int
    first_seq: int
    last_seq: int


async def rebuild(
    messaging: Messaging, subjects: Subjects, pool: str, *, at_seq: int = 0, before_s: float = 0.0, caches: Caches | None = None
) -> Rebuilt:
    """Rebuild up to message `at_seq`, or up to the last one stored before the Unix time `before_s`; 0 and 0: up to now.

    Raises NotKept, JetStreamError.
    """
    store = SnapshotStore(messaging, subjects, pool)
    state = await store.state()
    if at_seq and not state.first_seq - 1 <= at_seq <= state.last_seq:
        raise NotKept(f"message {at_seq} is not there: {store.stream} has {state.first_seq} to {state.last_seq}")
    caches = caches or Caches()
    reader = KvEventReader(caches, caches.index, pool=pool)
    until = at_seq or state.last_seq
    begun = await restore(
        reader, store, block_size=await _block_size(store), at_most=await _latest(store, until, before_s, state.first_seq)
    )
    seq, at, replayed = begun.start_seq - 1, 0.0, 0
    end = min(until, state.last_of_subject)
    follow = messaging.follow(store.stream, store.subject, start_seq=begun.start_seq)
    loop = asyncio.get_running_loop()
    try:
        while follow.position < end:
            async with asyncio.timeout(READ_TIMEOUT_S):
                batch = await follow.next()
            for message in batch.messages:
                if message.seq > until or (before_s and message.at >= before_s):
                    end = 0
                    break
                work = reader.receive(message.subject.rpartition(".")[2], message.seq, message.data, loop.time())
                if work is not None:
                    await run_sliced(work)
                seq, at, replayed = message.seq, message.at, replayed + 1
            await asyncio.sleep(0)
    except TimeoutError:
        raise JetStreamError(f"{store.stream} could not be read within {READ_TIMEOUT_S:g} s") from None
    finally:
        await follow.close()
    return Rebuilt(reader, caches, seq, at, begun.source, replayed, state.first_seq, state.last_seq)


async def _block_size(store: SnapshotStore) -> int:
    try:
        pointer, _revision = await store.pointer()
    except UnreadablePointer:
        return 0
    return pointer.block_size if pointer is not None else 0


async def _latest(store: SnapshotStore, until: int, before_s: float, first_seq: int) -> int:
    if not before_s:
        return until
    try:
        pointer, _revision = await store.pointer()
    except UnreadablePointer:
        return until
    usable = [kept.seq for kept in pointer.kept if kept.at <= before_s] if pointer is not None else []
    return min(until, max(usable, default=first_seq - 1)) or 1
