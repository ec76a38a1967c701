"""Stores answers of the Responses API, so that any ingress can serve them and continue from them.

An answer holds its own turn (the client's input and the model's output) and the ids of all turns before it.  So storing a turn
costs only its own bytes, and a conversation of any length is read in two steps: its last turn, then all the others at once.

The answers are in the object store `<prefix>_responses`, each with its own time to live.  When the store is full the oldest
ones of the tenant that has the most are removed (`store_room.py`); an answer that lost its first turns in this way cannot be
continued.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import heapq
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import structlog

from headrace.broker import metrics
from headrace.broker.codec import encode
from headrace.broker.dead_letters import note_failure
from headrace.broker.errors import ResponseNotStored, ResponseUnknown
from headrace.broker.messages.requests import Record
from headrace.jetstream.errors import JetStreamError, ObjectCorrupt, ObjectNotFound, RequestTimeout, RevisionConflict
from headrace.jetstream.objects import CHUNK, ObjectInfo, ObjectSubjects
from headrace.jetstream.ports import Messaging, StoredMessage
from headrace.jetstream.subjects import Subjects, check_token
from headrace.jetstream.watch import is_marker

# Shares of tenants in a store that is full: whose values make room is decided here. Pure.
#
# The tenant that has the most makes room, with its oldest values. So a tenant that has no more than its equal part of the
# store loses nothing, however much others store, and one that is alone may use it all.


class Victim(NamedTuple):
    tenant: str
    key: str
    size: int


class StoreShares:
    """The values of all tenants, by key, reported in the order in which they were stored."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, int]] = {}  # tenant -> key -> size, the oldest first
        self._bytes: dict[str, int] = {}
        self._owners: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def keep(self, key: str, tenant: str, size: int) -> None:
        self.drop(key)
        self._owners[key] = tenant
        self._held.setdefault(tenant, {})[key] = size
        self._bytes[tenant] = self._bytes.get(tenant, 0) + size

    def drop(self, key: str) -> None:
        tenant = self._owners.pop(key, None)
        if tenant is None:
            return
        held = self._held[tenant]
        self._bytes[tenant] -= held.pop(key)
        if not held:
            del self._held[tenant], self._bytes[tenant]

    def bytes_of(self, tenant: str) -> int:
        return self._bytes.get(tenant, 0)

    def take(self, wanted: int, *, most: int) -> list[Victim]:
        """Choose and forget values that have so many bytes together, at most `most` values: always of the largest tenant."""
        heap = [(-size, tenant) for tenant, size in self._bytes.items()]
        heapq.heapify(heap)
        taken: list[Victim] = []
        while heap and wanted > 0 and len(taken) < most:
            tenant = heap[0][1]
            key, size = next(iter(self._held[tenant].items()))
            self.drop(key)
            taken.append(Victim(tenant, key, size))
            wanted -= size
            if tenant in self._bytes:
                heapq.heapreplace(heap, (-self._bytes[tenant], tenant))
            else:
                heapq.heappop(heap)
        return taken


# Makes room in a store of limited bytes before the server does, so that no tenant's values push out those of another.
#
# A full stream removes its oldest messages, whosever they are. Here a store is never quite full: beyond seven eighths the
# values of the tenant that has the most make room (`store_shares.py`), before anything more is stored. An ingress knows the
# bytes from the server, and those of each tenant from the messages that describe the values, which it reads once and then
# only behind the last one. What other ingresses are storing at the same moment it does not know: the last eighth is for that.

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


# Keeps small records of tenants by kind and id, so that they can be listed and changed: what object stores cannot do.
#
# A record is a value of a few kilobytes in the bucket `<prefix>_records` with its own time to live; larger parts of it are in
# the store of responses, under names that the record knows. When the bucket is full the oldest records of the tenant that has
# the most are removed (`store_room.py`).

WRITE_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 5.0
TRIES = 16  # of a change, against others that change the same record
PAUSE_S = 0.01  # between tries, growing
MESSAGE_BYTES = 256  # of the stream, beside the value: subject, headers, what the server keeps with a message


class RecordIndex:
    def __init__(self, messaging: Messaging, subjects: Subjects, *, ttl_s: float) -> None:
        bucket = subjects.bucket("records")
        self._bucket = messaging.bucket(bucket)
        self._ttl_s = ttl_s
        self.room = StoreRoom(messaging, Place("records", f"KV_{bucket}", f"$KV.{bucket}.>", kept_record, self._bucket.delete))

    async def put(self, kind: str, tenant: str, name: str, value: bytes) -> None:
        """Write a record, new or not. Raises ResponseNotStored."""
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S), self.room.reserve(len(value) + MESSAGE_BYTES):
                await self._bucket.put(record_key(kind, tenant, name), value, ttl_s=self._ttl_s)
        except TimeoutError:
            raise ResponseNotStored(f"not stored within {WRITE_TIMEOUT_S:g} s", reason="timeout") from None
        except JetStreamError as error:
            raise ResponseNotStored(str(error), reason="unavailable") from error

    async def get(self, kind: str, tenant: str, name: str) -> bytes | None:
        """Return a record, None if there is none. Raises a JetStreamError if the bucket cannot be reached."""
        entry = await self._bucket.get(record_key(kind, tenant, name))
        return entry.value if entry is not None else None

    async def change(self, kind: str, tenant: str, name: str, change: Callable[[bytes], bytes]) -> bytes | None:
        """Replace a record by what `change` makes of it, and return that; None if there is none.

        `change` is called again if another writer was first. Raises what it raises, and a JetStreamError.
        """
        key = record_key(kind, tenant, name)
        for attempt in range(TRIES):
            entry = await self._bucket.get(key)
            if entry is None:
                return None
            value = change(entry.value)
            try:
                async with self.room.reserve(len(value) + MESSAGE_BYTES):
                    await self._bucket.update(key, value, revision=entry.revision, ttl_s=self._ttl_s)
            except RevisionConflict:
                await asyncio.sleep(PAUSE_S * attempt)
            else:
                return value
        raise RequestTimeout(f"record {name!r} was changed by others {TRIES} times meanwhile")

    async def delete(self, kind: str, tenant: str, name: str) -> None:
        """Delete a record; an absent one is fine. Raises a JetStreamError."""
        await self._bucket.delete(record_key(kind, tenant, name))

    async def list(self, kind: str, tenant: str) -> list[bytes]:
        pattern = f"{check_token(kind, 'kind')}.{check_token(tenant, 'tenant')}.*"
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                return [entry.value for entry in await self._bucket.entries(pattern)]
        except TimeoutError:
            raise RequestTimeout(f"the records were not read within {READ_TIMEOUT_S:g} s") from None


def digest(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def record_key(kind: str, tenant: str, name: str) -> str:
    """Return the key of a record. Names are hashed, because clients choose some of them."""
    return f"{check_token(kind, 'kind')}.{check_token(tenant, 'tenant')}.{digest(name)}"


def kept_record(message: StoredMessage) -> Held | None:
    """Return the owner and size of a record by its message, None for a malformed key."""
    parts = message.subject.split(".", 2)  # `$KV`, the bucket, the key
    key = parts[2]
    names = key.split(".")
    if len(names) != 3:
        return None
    return Held(key, None if is_marker(message) else names[1], len(message.data) + MESSAGE_BYTES)


READS_AT_ONCE = 16
FORGET_DELETED_S = 60.0
DAY_S = 86_400.0
TENANT = "headrace-tenant"  # the key of the description's metadata
DESCRIPTION_BYTES = 512

Item = dict[str, Any]


class StoredResponse(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A turn of a conversation. `answer` is the JSON that clients get; `input` and `output` are JSON lists of items.

    `chain` has the ids of the turns before, oldest first; `chain_bytes` is the size of all their items together.
    """

    id: str
    tenant: str = "_"
    created: float = 0.0
    answer: bytes = b""
    input: bytes = b"[]"
    output: bytes = b"[]"
    chain: list[str] = []
    chain_bytes: int = 0
    before: bytes = b""  # of one in the background on a conversation that is still made: its items, compressed with zlib
    judge: str = ""  # the ingress that is still generating it; empty = it has ended
    job: str = ""  # the stored job that makes it, by its token; its result is the last word on how it ended
    events: bytes = b""  # of a background response: all events as they were sent, compressed with zlib

    @property
    def item_bytes(self) -> int:
        return len(self.input) + len(self.output)

    def items(self) -> list[Item]:
        return [*msgspec.json.decode(self.input, type=list[Item]), *msgspec.json.decode(self.output, type=list[Item])]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Limits of the store. `max_bytes` is the largest size of one turn."""

    ttl_s: float = 30 * DAY_S
    max_bytes: int = 8 * 1024 * 1024
    write_timeout_s: float = 2.0
    read_timeout_s: float = 5.0


class ResponseStore:
    def __init__(self, messaging: Messaging, subjects: Subjects, limits: StoreLimits | None = None) -> None:
        bucket = subjects.bucket("responses")
        described = ObjectSubjects(bucket)
        self._objects = messaging.objects(bucket)
        self._limits = limits or StoreLimits()
        self.room = StoreRoom(
            messaging, Place("responses", described.stream, described.all_descriptions, described_answer, self._remove)
        )

    async def put(self, response: StoredResponse) -> None:
        """Store a response, within the write timeout. Raises ResponseNotStored."""
        limits = self._limits
        data = encode(response)
        if len(data) > limits.max_bytes:
            message = f"the response takes {len(data)} bytes; the limit is {limits.max_bytes}"
            raise ResponseNotStored(message, reason="too_large")
        try:
            async with (
                asyncio.timeout(limits.write_timeout_s),
                self.room.reserve(stored_size(len(data))),
                self._objects.writer(response.id, ttl_s=limits.ttl_s) as writer,
            ):
                await writer.write(data)
                await writer.commit(metadata={TENANT: response.tenant})
        except TimeoutError:
            raise ResponseNotStored(f"not stored within {limits.write_timeout_s:g} s", reason="timeout") from None
        except JetStreamError as error:
            raise ResponseNotStored(str(error), reason="unavailable") from error

    async def get(self, response_id: str, tenant: str) -> StoredResponse:
        """Return a response of this tenant. Raises ResponseUnknown, and a JetStreamError if the store cannot be reached."""
        try:
            data = await self._objects.get(response_id, timeout_s=self._limits.read_timeout_s)
            response = msgspec.msgpack.decode(data, type=StoredResponse)
        except ObjectNotFound:
            raise ResponseUnknown(response_id) from None
        except (ObjectCorrupt, msgspec.MsgspecError) as error:
            log.warning("stored_response.damaged", response=response_id, error=str(error))
            raise ResponseUnknown(response_id) from error
        if response.tenant != tenant:
            raise ResponseUnknown(response_id)
        return response

    async def get_all(self, response_ids: Sequence[str], tenant: str) -> list[StoredResponse]:
        """Return several responses, in the order of their ids. Raises as `get` does, for the first that fails."""
        gate = asyncio.Semaphore(READS_AT_ONCE)

        async def one(response_id: str) -> StoredResponse:
            async with gate:
                return await self.get(response_id, tenant)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(response_id)) for response_id in response_ids]
        except BaseExceptionGroup as failed:
            raise _first(failed) from None
        return [task.result() for task in tasks]

    async def delete(self, response_id: str, tenant: str) -> None:
        """Delete a response of this tenant. Raises as `get` does."""
        await self.get(response_id, tenant)
        await self._remove(response_id)

    async def _remove(self, response_id: str) -> None:
        await self._objects.delete(response_id, ttl_s=FORGET_DELETED_S)


def stored_size(size: int) -> int:
    """Return the estimated size of an answer of so many bytes in the stream."""
    return size + DESCRIPTION_BYTES + MESSAGE_BYTES * (1 + -(-size // CHUNK))


def described_answer(message: StoredMessage) -> Held | None:
    """Return whose answer a description is of, None for one that cannot be read.

    Those that were stored before descriptions named the tenant are of one tenant without a name.
    """
    try:
        info = msgspec.json.decode(message.data, type=ObjectInfo)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return Held(info.name, None if info.deleted else info.metadata.get(TENANT, ""), stored_size(info.size))
