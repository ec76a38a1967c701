"""Stores a worker's cache events in the KV stream, with contiguous numbers and one message in flight at a time.

While a message is in flight, later steps are merged into the next one. A message with an unknown outcome is published again
under the same id until it is known to be stored, however long that takes: the server drops a duplicate within its window, and
readers drop it by its number after that. Only a message that the server can never accept is given up; its number stays unused,
so that readers see the gap, and a reset follows.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Mapping

import structlog

from headrace.broker.places import rank_of
from headrace.broker.settings import Timing
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.workers import metrics
from headrace.workers.engine import Tier
from headrace.workers.kv.outbox import MAX_BYTES, Outbox, Sealed
from headrace.workers.kv.translator import CacheChange

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

    # -- calls by the worker------------------------------------------------------------------------------------------------

    def step(self, change: CacheChange) -> None:
        """Add the changes of an engine step; the first step brings the blocks cached at the start. Never blocks."""
        if change:
            self._outbox.merge(change)
            metrics.KV_WAITING.labels(self._rank).set(self._outbox.size)
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
        """Publish until cancelled."""
        while True:
            await self._until_due(lease_held)
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
            for tier, values in inventory.items():
                metrics.KV_BLOCKS.labels(tier, self._rank).set(len(values))
            metrics.KV_WAITING.labels(self._rank).set(0)
            for message in messages:
                if not await self._store(message, lease_held):
                    break

    def _dump_due(self) -> bool:
        return self._dump_wanted and self._loop.time() >= self._dumped_s + DUMP_EVERY_S

    async def _until_due(self, lease_held: Callable[[], bool]) -> None:
        """Wait until there is something to publish and the lease is held."""
        while True:
            now = self._loop.time()
            wait_s = POLL_S
            if self._primed and lease_held():
                if self._outbox or not self._begun or self._dump_due():
                    if self._begun:
                        await asyncio.sleep(GATHER_S)
                    return
                if self._dump_wanted:
                    wait_s = min(wait_s, self._dumped_s + DUMP_EVERY_S - now)
            self._wake.clear()
            await self._woken(wait_s)

    async def _woken(self, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await self._wake.wait()
        except TimeoutError:
            pass

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
