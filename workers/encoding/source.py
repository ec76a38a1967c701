"""Gets the embeddings of a request's media for a serving worker: from the object store, else by having them computed.

The name of an item's embeddings follows from its content, so the store is looked into first; what it lacks the encode worker is
asked for that the XX has one deadline, and nothing of it can fail a request: what
did not come is encoded by the worker's own engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import structlog

from headrace.base.errors import HeadraceError
from headrace.broker.codec import decode, encode
from headrace.broker.errors import WireError
from headrace.broker.messages.requests import EncodeMedia, Generation, LentRecord, MediaEncoded
from headrace.jetstream.errors import JetStreamError, ObjectCorrupt, ObjectNotFound
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import EMBEDDINGS
from headrace.workers import metrics
from headrace.workers.encoding.server import DamagedEmbeddings, in_order, object_name, unseal
from headrace.workers.engine import Sequence
from headrace.workers.runtime.sequences import MediaOrigin

# Keeps requests from waiting again and again for a store that does not answer. Sans-io.

FIRST_S = 1.0
LONGEST_S = 30.0


class Breaker:
    """Lets nothing through for a while after a failure, twice as long after each further one."""

    def __init__(self, clock: Callable[[], float], *, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> None:
        self._clock = clock
        self._first_s = first_s
        self._longest_s = longest_s
        self._pause_s = 0.0
        self._until = float("-inf")

    @property
    def closed(self) -> bool:
        return self._clock() >= self._until

    def failed(self) -> None:
        if not self.closed:
            return
        self._pause_s = min(self._longest_s, self._pause_s * 2 or self._first_s)
        self._until = self._clock() + self._pause_s

    def succeeded(self) -> None:
        self._pause_s = 0.0
        self._until = float("-inf")


# Keeps the embeddings that a worker used last, in bounded memory, so that the choices of a request fetch them once.

MOST_BYTES = 128 << 20


class KeptEmbeddings:
    """The last used embeddings by name, `most_bytes` of them."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self.bytes = 0

    def get(self, name: str) -> bytes | None:
        data = self._kept.get(name)
        if data is not None:
            self._kept.move_to_end(name)
        return data

    def put(self, name: str, data: bytes) -> None:
        """Keep embeddings; those that were not used for longest make room. What is larger than everything is not kept."""
        if len(data) > self._most_bytes or name in self._kept:
            return
        self._kept[name] = data
        self.bytes += len(data)
        while self.bytes > self._most_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.bytes -= len(dropped)


log = structlog.get_logger()

LONGER = 16  # bytes by which `reads` makes a question longer
TRIES = 2  # encode workers that are asked for an item
_STORE = ""  # the breaker of the store, beside those of workers
_MEMORY = " memory"  # added to a worker's name: the breaker of its memory
READ_SHARE = 4  # a read may take this part of the wait


class Reading(Protocol):
    """Reads other workers' memory (`headrace.workers.encoding.lending.RecordReader`)."""

    @property
    def most_bytes(self) -> int:
        """The largest record that can be read, 0 for none."""

    async def read(self, lent: LentRecord, *, timeout_s: float) -> bytes:
        """Return the bytes of an offer. Raises a HeadraceError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDeps:
    messaging: Messaging
    subjects: Subjects
    pool: str
    encoder: str  # `EngineInfo.encoder`
    encoders: Callable[[], Seq[str]]
    wait_s: float  # most seconds that a request waits
    reader: Reading | None = None  # without one all goes by the store
    clock: Callable[[], float] = time.monotonic


class EmbeddingSource:
    """Implements `headrace.workers.runtime.sequences.Embeddings`."""

    def __init__(self, deps: SourceDeps) -> None:
        self._deps = deps
        self._objects = deps.messaging.objects(deps.subjects.pool_bucket(EMBEDDINGS, deps.pool))
        self._kept = KeptEmbeddings()
        self._breakers: dict[str, Breaker] = {}
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    async def fetch(self, sequence: Sequence, origin: MediaOrigin) -> Mapping[int, bytes]:
        """Return the available embeddings by the index of the item.

        Those of items in the part of the prompt that should be cached are not fetched.
        """
        wanted = [number for number, item in enumerate(sequence.media) if _end(item) > sequence.expected_cached]
        found: dict[int, bytes] = {}
        began_s = self._deps.clock()
        try:
            async with asyncio.timeout(self._deps.wait_s), asyncio.TaskGroup() as tasks:
                for number in wanted:
                    tasks.create_task(self._fetch(sequence, origin, number, found))
        except TimeoutError:
            metrics.EMBEDDING_FAILURES.labels("late").inc()
            log.warning(
                "embeddings.late", request_id=origin.request_id, wait_s=self._deps.wait_s, items=len(wanted) - len(found)
            )
        metrics.EMBEDDINGS.labels("here").inc(len(wanted) - len(found))
        if wanted:
            metrics.EMBEDDING_S.observe(self._deps.clock() - began_s)
        return found

    async def _fetch(self, sequence: Sequence, origin: MediaOrigin, number: int, found: dict[int, bytes]) -> None:
        try:
            await self._fetch_one(sequence, origin, number, found)
        except Exception as error:  # whatever it is, the engine can encode the item
            metrics.EMBEDDING_FAILURES.labels("error").inc()
            log.exception("embeddings.failed", request_id=origin.request_id, item=number, error=str(error))

    async def _fetch_one(self, sequence: Sequence, origin: MediaOrigin, number: int, found: dict[int, bytes]) -> None:
        item = sequence.media[number]
        kind, data = item.get("kind"), item.get("data")
        if not isinstance(kind, str) or not isinstance(data, bytes):
            return  # the engine says what is wrong with it
        name = await asyncio.to_thread(object_name, self._deps.encoder, sequence.cache_salt, kind, data)
        async with self._alone(name):
            source, embeddings = "kept", self._kept.get(name)
            if embeddings is None:
                source, embeddings = "store", await self._stored(name)
            if embeddings is None:
                source, embeddings = await self._computed(sequence, origin, number, name)
        if embeddings is not None:
            self._kept.put(name, embeddings)
            metrics.EMBEDDINGS.labels(source).inc()
            found[number] = embeddings

    @contextlib.asynccontextmanager
    async def _alone(self, name: str) -> AsyncIterator[None]:
        """Let the first of those who want an item fetch it, and the others find it."""
        lock, users = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks.pop(name)
            if users > 1:
                self._locks[name] = lock, users - 1

    async def _stored(self, name: str) -> bytes | None:
        breaker = self._breaker(_STORE)
        if not breaker.closed:
            return None
        try:
            embeddings = unseal(name, await self._objects.get(name, timeout_s=self._deps.wait_s))
        except ObjectNotFound:
            breaker.succeeded()
            return None
        except (DamagedEmbeddings, ObjectCorrupt) as error:
            metrics.EMBEDDING_FAILURES.labels("damaged").inc()
            log.warning("embeddings.damaged", name=name, error=str(error))
            return None
        except JetStreamError as error:
            breaker.failed()
            metrics.EMBEDDING_FAILURES.labels("store").inc()
            log.warning("embeddings.store_failed", name=name, error=str(error))
            return None
        breaker.succeeded()
        return embeddings

    async def _computed(self, sequence: Sequence, origin: MediaOrigin, number: int, name: str) -> tuple[str, bytes | None]:
        """Have an encode worker make an item's embeddings. Returns how they came, and them if they did."""
        job = _job(sequence, origin, number, name)
        if len(encode(job)) + LONGER > self._deps.messaging.max_payload:
            metrics.EMBEDDING_FAILURES.labels("too_large").inc()
            return "", None
        for worker in [one for one in in_order(name, self._deps.encoders()) if self._breaker(one).closed][:TRIES]:
            answer = await self._asked(worker, job, reads=self._readable(worker))
            if answer is not None and answer.lent is not None:
                embeddings = await self._read(worker, name, answer.lent)
                if embeddings is not None:
                    return "nixl", embeddings
                answer = await self._asked(worker, job, reads=0)
            if answer is not None:
                return "encoder", await self._stored(name)
        return "", None

    async def _asked(self, worker: str, job: EncodeMedia, *, reads: int) -> MediaEncoded | None:
        question = encode(msgspec.structs.replace(job, reads=reads))
        subject = self._deps.subjects.peer(self._deps.pool, worker)
        try:
            reply = await self._deps.messaging.request(subject, question, timeout_s=self._deps.wait_s / TRIES)
            answer = decode(MediaEncoded, reply)
        except (JetStreamError, WireError) as error:
            self._breaker(worker).failed()
            metrics.EMBEDDING_FAILURES.labels("encoder_lost").inc()
            log.warning("embeddings.encoder_lost", request_id=job.id, worker=worker, error=str(error))
            return None
        self._breaker(worker).succeeded()
        if not answer.ok:
            metrics.EMBEDDING_FAILURES.labels("refused").inc()
            log.warning("embeddings.refused", request_id=job.id, worker=worker, why=answer.message)
            return None
        return answer

    def _readable(self, worker: str) -> int:
        """Return the most bytes that can be read of a worker's memory."""
        reader = self._deps.reader
        return reader.most_bytes if reader is not None and self._breaker(worker + _MEMORY).closed else 0

    async def _read(self, worker: str, name: str, lent: LentRecord) -> bytes | None:
        reader, breaker = self._deps.reader, self._breaker(worker + _MEMORY)
        if reader is None:
            return None
        try:
            record = await reader.read(lent, timeout_s=self._deps.wait_s / READ_SHARE)
            embeddings = await asyncio.to_thread(unseal, name, record)
        except DamagedEmbeddings as error:
            metrics.EMBEDDING_FAILURES.labels("damaged").inc()
            log.warning("embeddings.damaged", name=name, worker=worker, error=str(error))
            return None
        except HeadraceError as error:
            breaker.failed()
            metrics.EMBEDDING_FAILURES.labels("read").inc()
            log.warning("embeddings.not_read", name=name, worker=worker, error=str(error))
            return None
        breaker.succeeded()
        return embeddings

    def _breaker(self, worker: str) -> Breaker:
        """Return the breaker of a worker, or of the store. Those of workers that have left are forgotten."""
        if worker not in self._breakers:
            live = {_STORE, worker.removesuffix(_MEMORY), *self._deps.encoders()}
            self._breakers = {one: kept for one, kept in self._breakers.items() if one.removesuffix(_MEMORY) in live}
            self._breakers[worker] = Breaker(self._deps.clock)
        return self._breakers[worker]


def _job(sequence: Sequence, origin: MediaOrigin, number: int, name: str) -> EncodeMedia:
    """Build the message: with the item itself, or where it is in the store of large payloads, with its place there."""
    if origin.spill is not None:
        return EncodeMedia(id=origin.request_id, name=name, item=number, spill=origin.spill)
    lone = Generation(token_ids=b"", media=[dict(sequence.media[number])], cache_salt=sequence.cache_salt)
    return EncodeMedia(id=origin.request_id, name=name, payload=encode(lone))


def _end(item: Mapping[str, Any]) -> int:
    """Return where an item ends in the prompt; one that does not say so is wanted."""
    start, length = item.get("start"), item.get("length")
    return start + length if isinstance(start, int) and isinstance(length, int) else 1 << 62
