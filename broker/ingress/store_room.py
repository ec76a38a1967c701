"""Makes room in a store of limited bytes before the server does, so that no tenant's values push out those of another.

A full stream removes its oldest messages, whosever they are.  Here a store is never quite full: beyond seven eighths the values
of the tenant that has the most make room (`store_shares.py`), before anything more is stored.  An ingress knows the bytes from
the server, and those of each tenant from the messages that describe the values, which it reads once and then only behind the
last one.  What other ingresses are storing at the same moment it does not know: the last eighth is for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple

import structlog

from headrace.broker import metrics
from headrace.broker.failed_deliveries import note_failure
from headrace.broker.ingress.store_shares import StoreShares, Victim
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Messaging, StoredMessage

log = structlog.get_logger()

NEAR = 3 / 4  # of the bytes: from here on each look reads what others have stored
FULL = 7 / 8
UNREAD = 15 / 16  # how full it may be while the task in the background reads whose values there are, for the first time
REST = 1 / 64  # which the task in the background makes free beyond that, so that a request seldom waits for it
LOOK_S = 2.0
FRESH_S = 1.0  # how old the server's word may be while the store is not nearly full
FRESH = 1 / 32  # of the bytes: what may be stored here upon it, as others may do the same meanwhile
STALE_S = 20.0  # after such a pause the marker of a deletion may be gone (it lives for 30 s): all is read again
PAGE = 1000
BATCH = 64  # values that are deleted between two looks
DELETES_AT_ONCE = 16
TOLD_S = 10.0


class Held(NamedTuple):
    """A value in the store. `tenant` None: it was deleted."""

    key: str
    tenant: str | None
    size: int


class Place(NamedTuple):
    """A store: its stream, the subjects that describe its values, and how to read and delete one."""

    name: str
    stream: str
    pattern: str
    read: Callable[[StoredMessage], Held | None]
    delete: Callable[[str], Awaitable[None]]


class StoreRoom:
    """The room of one store, as one ingress sees it."""

    def __init__(self, messaging: Messaging, place: Place, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._messaging = messaging
        self._place = place
        self._clock = clock
        self._lock = asyncio.Lock()
        self._looks = 0
        self._arriving = 0  # bytes that are being stored here
        self._stored = 0  # here, ever
        self._elsewhere = 0  # the server's bytes without those
        self._stored_before = 0  # here, when the server was asked
        self._limit = 0
        self._read_at = self._indexed_at = -STALE_S
        self._created = ""
        self._shares = StoreShares()
        self._seq = 0
        self._read = self._running = False  # whether all of it was read once, and the task in the background runs
        self._removed: dict[str, list[int]] = {}  # number and bytes by tenant, not yet told
        self._told_at = -TOLD_S

    @contextlib.asynccontextmanager
    async def reserve(self, size: int) -> AsyncIterator[None]:
        """Make room for so many bytes, which are stored in the block. Raises JetStreamError."""
        self._arriving += size
        try:
            await self._make_room()
            yield
            self._stored += size
        finally:
            self._arriving -= size

    async def run(self) -> None:
        """Keep a little room free until cancelled."""
        self._running = True
        while True:
            try:
                async with self._lock:
                    await self._look(REST)
            except JetStreamError as error:
                log.info("store.not_looked_at", store=self._place.name, error=str(error))
            except Exception as error:  # what nothing foresaw must not end the frontend
                note_failure("store", error)
            await asyncio.sleep(LOOK_S * (0.5 + random.random()))  # noqa: S311 - it spreads the load

    async def _make_room(self) -> None:
        since = self._stored + self._arriving - self._stored_before
        fresh = self._clock() - self._read_at < FRESH_S and since <= FRESH * self._limit
        if not fresh or self._total() > NEAR * self._limit:
            await self._read_state()
        if self._limit < 1 or self._total() <= (FULL if self._read or not self._running else UNREAD) * self._limit:
            return
        looks = self._looks
        async with self._lock:
            if self._looks == looks:  # otherwise one that began later has counted this one's bytes
                await self._look(0.0)

    def _total(self) -> int:
        return self._elsewhere + self._stored + self._arriving

    async def _look(self, rest: float) -> None:
        """Compare the store with its limit, and make room. Raises JetStreamError."""
        self._looks += 1
        await self._read_state()
        if self._total() <= NEAR * self._limit or self._limit < 1:
            return
        if self._clock() - self._indexed_at > STALE_S:
            self._forget()
        await self._read_behind()
        while (over := self._total() - int((FULL - rest) * self._limit)) > 0:
            victims = self._shares.take(over, most=BATCH)
            if not victims:  # what fills it is still being written, or has no description
                log.warning("store.no_room_found", store=self._place.name, bytes=self._total(), limit=self._limit)
                return
            await self._remove(victims)
            await self._read_state()
            await self._read_behind()  # under load this loop may go on for long

    async def _read_state(self) -> None:
        stored = self._stored
        state = await self._messaging.stream_state(self._place.stream)
        self._elsewhere, self._limit = state.bytes - stored, max(0, state.max_bytes)
        self._stored_before = stored
        self._read_at = self._clock()
        if state.created != self._created:  # it was made again
            self._created = state.created
            self._forget()

    async def _read_behind(self) -> None:
        while True:
            page = await self._messaging.subject_messages(
                self._place.stream, self._place.pattern, limit=PAGE, start_seq=self._seq + 1
            )
            for message in page:
                held = self._place.read(message)
                if held is None:
                    continue
                if held.tenant is None:
                    self._shares.drop(held.key)
                else:
                    self._shares.keep(held.key, held.tenant, held.size)
            self._seq = page[-1].seq if page else self._seq
            self._indexed_at = self._clock()
            if len(page) < PAGE:
                self._read = True
                return
            await asyncio.sleep(0)

    async def _remove(self, victims: Sequence[Victim]) -> None:
        gate = asyncio.Semaphore(DELETES_AT_ONCE)
        removed: list[Victim] = []

        async def one(victim: Victim) -> None:
            async with gate:
                await self._place.delete(victim.key)
            removed.append(victim)

        try:
            async with asyncio.TaskGroup() as group:
                for victim in victims:
                    group.create_task(one(victim))
        except BaseExceptionGroup as failed:
            raise _first(failed) from None
        finally:
            gone = {victim.key for victim in removed}
            for victim in victims:
                if victim.key not in gone:  # it counts on; if it was deleted all the same, its marker says so
                    self._shares.keep(victim.key, victim.tenant, victim.size)
            self._count(removed)

    def _count(self, victims: Sequence[Victim]) -> None:
        metrics.STORE_REMOVED.labels(self._place.name).inc(len(victims))
        metrics.STORE_REMOVED_BYTES.labels(self._place.name).inc(sum(victim.size for victim in victims))
        for victim in victims:
            told = self._removed.setdefault(victim.tenant, [0, 0])
            told[0] += 1
            told[1] += victim.size
        if self._clock() - self._told_at < TOLD_S:
            return
        self._told_at = self._clock()
        for tenant, (number, size) in self._removed.items():
            log.warning("store.made_room", store=self._place.name, tenant=tenant, number=number, bytes=size)
        self._removed.clear()

    def _forget(self) -> None:
        self._shares, self._seq, self._read = StoreShares(), 0, False


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
