"""Stores a worker's cache events in the KV stream, with contiguous numbers and one message in flight at a time.

While a message is in flight, later steps are merged into the next one. A message with an unknown outcome is published again
under the same id until it is known to be stored, however long that takes: the server drops a duplicate within its window, and
readers drop it by its number after that. Only a message that the server can never accept is given up; its number stays unused,
so that readers see the gap, and a reset follows.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from headrace.broker.codec import encode, pack_u64
from headrace.broker.messages.events import KvReset, KvStep
from headrace.broker.messages.members import WorkerMember
from headrace.broker.places import place_name, rank_of, ranks_of
from headrace.broker.settings import Timing
from headrace.broker.worker.ports import KvPort
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.workers import metrics
from headrace.workers.engine import POOLING_KINDS, TIERS, Engine, EngineInfo, Tier
from headrace.workers.kv.feed import KvFeed
from headrace.workers.kv.translator import CacheChange, Translator

# Merges the cache changes that wait to be published, and packs them into numbered messages. Sans-io.
#
# The waiting changes are the net effect since the last message, one entry per block, so they never exceed the blocks that
# readers know plus those cached now. Messages are numbered when they are packed; the number of a message that cannot be
# stored stays unused, and readers see the gap.

MAX_BYTES = 256 * 1024
HEADROOM = 512  # bytes for everything in a message except the blocks
_WORD = 8


@dataclass(frozen=True, slots=True)
class Sealed:
    """A message with its number; `blocks` is the number of its entries."""

    n: int
    kind: str  # step or reset
    data: bytes
    blocks: int


class Outbox:
    """The unpublished cache changes of an epoch of a worker."""

    def __init__(self, *, worker: str, epoch: int) -> None:
        self.n = 0  # of the next message
        self._worker = worker
        self._epoch = epoch
        self._dumps = 0
        self.size = 0  # changes that wait
        self._cleared = False
        self._removed: dict[Tier, dict[int, None]] = {tier: {} for tier in TIERS}
        self._stored: dict[Tier, dict[int, None]] = {tier: {} for tier in TIERS}

    def merge(self, change: CacheChange) -> None:
        if change.cleared:
            self._drop()
            self._cleared = True
        for tier, values in change.removed.items():
            self._net(values, self._removed[tier], self._stored[tier])
        for tier, values in change.stored.items():
            self._net(values, self._stored[tier], self._removed[tier])

    def _net(self, values: list[int], wait: dict[int, None], opposite: dict[int, None]) -> None:
        """Have these blocks wait. A block whose opposite change waits has not changed for readers."""
        for value in values:
            if value in opposite:
                del opposite[value]
                self.size -= 1
            elif value not in wait:
                wait[value] = None
                self.size += 1

    def __bool__(self) -> bool:
        return self._cleared or self.size > 0

    def seal(self, inventory: Mapping[Tier, Collection[int]], *, max_bytes: int = MAX_BYTES) -> list[Sealed]:
        """Pack all waiting changes into numbered steps of at most `max_bytes`: at least one step, even if it is empty.

        `inventory` holds the blocks cached now. If it is shorter than the list of changes, it is sent instead.
        """
        if not self._cleared and self.size > sum(map(len, inventory.values())):
            self.merge(CacheChange(cleared=True, stored={tier: list(values) for tier, values in inventory.items()}))
        waiting = [("removed", tier, list(values)) for tier, values in self._removed.items() if values]
        waiting += [("stored", tier, list(values)) for tier, values in self._stored.items() if values]
        cleared = self._cleared
        self._drop()
        sealed = []
        for part in _parts(waiting, max_bytes):
            removed: dict[str, bytes] = {}
            stored: dict[str, bytes] = {}
            blocks = 0
            for what, tier, values in part:
                (stored if what == "stored" else removed)[tier] = pack_u64(values)
                blocks += len(values)
            step = KvStep(worker=self._worker, epoch=self._epoch, n=self.n, cleared=cleared, removed=removed, stored=stored)
            self.n += 1
            sealed.append(Sealed(step.n, "step", encode(step), blocks))
            cleared = False
        return sealed

    def dump(self, inventory: Mapping[Tier, Collection[int]], *, max_bytes: int = MAX_BYTES) -> list[Sealed]:
        """Pack the whole inventory into numbered parts of a reset. It includes the waiting changes."""
        self._drop()
        self._dumps += 1
        parts = _parts([("", tier, list(inventory.get(tier, ()))) for tier in TIERS], max_bytes)
        sealed = []
        for number, part in enumerate(parts):
            reset = KvReset(
                worker=self._worker,
                epoch=self._epoch,
                n=self.n,
                dump=self._dumps,
                part=number,
                last=number == len(parts) - 1,
                blocks={tier: pack_u64(values) for _, tier, values in part},
            )
            self.n += 1
            sealed.append(Sealed(reset.n, "reset", encode(reset), sum(len(values) for _, _, values in part)))
        return sealed

    def _drop(self) -> None:
        self.size = 0
        self._cleared = False
        for tier in TIERS:
            self._removed[tier] = {}
            self._stored[tier] = {}


_Blocks = tuple[str, Tier, list[int]]


def _parts(lists: list[_Blocks], max_bytes: int) -> list[list[_Blocks]]:
    """Cut these lists into the parts of messages, in order: one at least, and each as long as a message may be."""
    most = left = max(1, (max_bytes - HEADROOM) // _WORD)
    parts: list[list[_Blocks]] = [[]]
    for what, tier, values in lists:
        while values:
            if not left:
                parts.append([])
                left = most
            part, values = values[:left], values[left:]
            parts[-1].append((what, tier, part))
            left -= len(part)
    return parts


log = structlog.get_logger()

GATHER_S = 0.005  # A step's tokens leave before its cache changes, and steps shorter than this share a message.
DUMP_EVERY_S = 1.0
POLL_S = 0.5  # longest time between two checks of the lease
FAILING_LOG_S = 10.0
HEADERS_BYTES = 1024  # bytes of a message that the server counts besides its body

Inventory = Callable[[], Mapping[Tier, Collection[int]]]


class KvPublisher:
    """Publishes the cache events of an epoch of a worker. Implements `headrace.broker.worker.ports.KvPort`."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        *,
        pool: str,
        worker: str,
        epoch: int,
        inventory: Inventory,
        timing: Timing | None = None,
    ) -> None:
        """`worker` is the place whose blocks these are. `inventory` returns those that are cached after all steps so far."""
        self._messaging = messaging
        self._subject = subjects.kv(pool, worker)
        self._worker = worker
        self._ids = secrets.token_hex(8)  # the server counts ids for all workers: one that can be guessed is taken
        self._rank = str(rank_of(worker) or 0)
        self._inventory = inventory
        self._timing = timing or Timing()
        self._outbox = Outbox(worker=worker, epoch=epoch)
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._primed = False
        self._begun = False
        self._dump_wanted = False
        self._dumped_s = -DUMP_EVERY_S
        self._failing_s: float | None = None
        self._logged_s = 0.0
        self._state = "starting"
        metrics.KV_WAITING.labels(self._rank).set_function(lambda: self._outbox.size)
        for tier in TIERS:
            metrics.KV_BLOCKS.labels(tier, self._rank).set_function(partial(self._blocks, tier))

    # -- calls by the worker------------------------------------------------------------------------------------------------

    def step(self, change: CacheChange) -> None:
        """Add the changes of an engine step; the first step brings the blocks cached at the start. Never blocks."""
        if change:
            self._outbox.merge(change)
        elif self._primed:
            return
        self._primed = True
        self._wake.set()

    def ask_dump(self) -> str:
        self._dump_wanted = True
        self._wake.set()
        return ""

    def lease_gained(self) -> None:
        self._wake.set()

    def lease_lapsed(self) -> None:
        self._state = "no lease"
        if self._begun:
            self._dump_wanted = True

    @property
    def state(self) -> str:
        return self._state

    # -- publishing --------------------------------------------------------------------------------------------------------

    async def run(self, lease_held: Callable[[], bool]) -> None:
        while True:
            while (wait_s := self._wait_s(lease_held)) > 0.0:
                self._wake.clear()
                await self._woken(wait_s)
            if self._begun:
                await asyncio.sleep(GATHER_S)
            most = min(MAX_BYTES, self._messaging.max_payload - HEADERS_BYTES)
            inventory = self._inventory()
            if self._begun and self._dump_due():
                self._dump_wanted = False
                self._dumped_s = self._loop.time()
                messages = self._outbox.dump(inventory, max_bytes=most)
                log.info("kv.dump", worker=self._worker, parts=len(messages), first=messages[0].n)
            else:
                messages = self._outbox.seal(inventory, max_bytes=most)
            self._begun = True
            for message in messages:
                if not await self._store(message, lease_held):
                    break

    def _blocks(self, tier: Tier) -> int:
        return len(self._inventory().get(tier, ()))

    def _dump_due(self) -> bool:
        return self._dump_wanted and self._loop.time() >= self._dumped_s + DUMP_EVERY_S

    def _wait_s(self, lease_held: Callable[[], bool]) -> float:
        """Return after how long to look again whether there is anything to publish, or 0 if there is."""
        at_once = bool(self._outbox) or not self._begun
        if not self._primed or not (at_once or self._dump_wanted) or not lease_held():
            return POLL_S
        return 0.0 if at_once else min(POLL_S, self._dumped_s + DUMP_EVERY_S - self._loop.time())

    async def _woken(self, within_s: float) -> None:
        timer = self._loop.call_later(within_s, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    async def _store(self, message: Sealed, lease_held: Callable[[], bool]) -> bool:
        """Publish a message until it is stored. Returns False if the server can never store it."""
        msg_id = f"{self._ids}.{message.n}"
        while True:
            if not lease_held():
                self._wake.clear()
                await self._woken(POLL_S)
                continue
            try:
                await self._messaging.publish(
                    self._subject, message.data, msg_id=msg_id, timeout_s=self._timing.publish_timeout_s
                )
            except PayloadTooLarge as error:
                self._give_up(message, error)
                return False
            except JetStreamError as error:
                self._failed(message, error)
                await asyncio.sleep(self._timing.retry_s)
            else:
                self._stored(message)
                return True

    def _stored(self, message: Sealed) -> None:
        metrics.KV_MESSAGES.labels(message.kind).inc()
        if self._failing_s is not None:
            log.info("kv.publish_recovered", worker=self._worker, after_s=round(self._loop.time() - self._failing_s, 1))
            self._failing_s = None
        if self._state != "ok":
            self._state = "ok"
            metrics.KV_OK.labels(self._rank).set(1)

    def _failed(self, message: Sealed, error: JetStreamError) -> None:
        now = self._loop.time()
        metrics.KV_FAILURES.labels(type(error).__name__).inc()
        metrics.KV_OK.labels(self._rank).set(0)
        self._state = f"failing: {error}"
        if self._failing_s is None:
            self._failing_s = now
            self._logged_s = now - FAILING_LOG_S
        if now - self._logged_s >= FAILING_LOG_S:
            self._logged_s = now
            log.warning("kv.publish_failed", worker=self._worker, n=message.n, error=str(error), waiting=self._outbox.size)

    def _give_up(self, message: Sealed, error: JetStreamError) -> None:
        """Drop a message that can never be stored. Its number, and those of the parts after it, stay unused."""
        self._failed(message, error)
        metrics.KV_SKIPPED.inc()
        log.error("kv.message_skipped", worker=self._worker, n=message.n, blocks=message.blocks, error=str(error))
        self._dump_wanted = True


class RankPublishers:
    """Runs a publisher per rank. Implements `headrace.broker.worker.ports.KvPort`."""

    def __init__(self, publishers: Sequence[KvPublisher]) -> None:
        self._publishers = publishers

    async def run(self, lease_held: Callable[[], bool]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for publisher in self._publishers:
                tasks.create_task(publisher.run(lease_held))

    def lease_gained(self) -> None:
        for publisher in self._publishers:
            publisher.lease_gained()

    def lease_lapsed(self) -> None:
        for publisher in self._publishers:
            publisher.lease_lapsed()

    def ask_dump(self) -> str:
        return next(filter(None, [publisher.ask_dump() for publisher in self._publishers]), "")

    @property
    def state(self) -> str:
        return next((publisher.state for publisher in self._publishers if publisher.state != "ok"), "ok")


@dataclass(frozen=True)
class CacheEvents:
    """Parts that announce an engine's cached blocks. All are empty for an engine without cache events."""

    port: KvPort | None = None  # for the session
    feeds: tuple[KvFeed, ...] = ()  # to be run, one per rank
    caches: tuple[Callable[[], Container[int]], ...] = ()  # per rank the chain values on the device
    tiers: Callable[[], list[int]] = list  # the blocks that all ranks hold together, per tier


def create_cache_events(
    connection: Messaging, subjects: Subjects, engine: Engine, info: EngineInfo, member: WorkerMember, *, pool_block: int
) -> CacheEvents:
    """Create the parts for a worker as its member record announces it: none where it says that it sends no cache events.

    `pool_block`: the tokens of the pool's blocks, into which those of the engine are cut.
    """
    if not member.kv_events:
        if not POOLING_KINDS & set(info.kinds) and member.role != "encode":
            log.warning(
                "worker.no_kv_events", engine=info.engine, meaning="routers guess from their own placements what it caches"
            )
        return CacheEvents()
    publishers, feeds, caches, translators = [], [], [], []
    for rank in ranks_of(info.ranks):
        translator = Translator(pool_block, blocks=info.blocks // info.ranks)
        publisher = KvPublisher(
            connection,
            subjects,
            pool=member.pool,
            worker=place_name(member.worker, rank),
            epoch=member.epoch,
            inventory=translator.inventory,
        )
        publishers.append(publisher)
        translators.append(translator)
        feeds.append(KvFeed(engine, translator, publisher.step, rank=rank or 0))
        caches.append(_device_of(translator))

    def tiers() -> list[int]:
        return [sum(counts) for counts in zip(*(one.held() for one in translators), strict=True)]

    port = publishers[0] if len(publishers) == 1 else RankPublishers(publishers)
    return CacheEvents(port=port, feeds=tuple(feeds), caches=tuple(caches), tiers=tiers)


def _device_of(translator: Translator) -> Callable[[], Container[int]]:
    return lambda: translator.device
