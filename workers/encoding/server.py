"""Runs the encoder for serving workers: an item of theirs becomes a record that they all find by the item's content.

A large record lies in memory that they read; a small one, and one for a worker that cannot read it, in the object store.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import structlog
import xxhash

from headrace.base.errors import HeadraceError
from headrace.broker.codec import decode, encode
from headrace.broker.errors import BrokerError
from headrace.broker.messages.requests import EncodeMedia, Generation, LentRecord, MediaEncoded
from headrace.broker.spill import fetch_payload
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import EMBEDDINGS
from headrace.workers import metrics
from headrace.workers.engine import MediaEncoder

# Names the embeddings of a media item by what they depend on, and orders the encode workers that may compute them.


def object_name(encoder: str, salt: str | None, kind: str, data: bytes) -> str:
    """Return the name of an item's embeddings: equal for equal bytes, encoders and salts, and for nothing else.

    With the salt in it a tenant cannot find out by the time of an answer what another one has sent.
    """
    return hashlib.sha256(encode([encoder, salt, kind, hashlib.sha256(data).digest()])).hexdigest()


def in_order(name: str, workers: Iterable[str]) -> list[str]:
    """Return the workers, best first: the same one for the same item while it lives, and each one for its share of items."""
    return sorted(workers, key=lambda worker: hashlib.sha256(f"{name} {worker}".encode()).digest())


# The form in which embeddings lie in the object store: a checksum over their name and bytes, then the bytes.
#
# Record: `HRME`, version (u8), 3 zero bytes, xxh3-128 of name, a zero byte and bytes (16 bytes), the bytes, whose form is the
# engine's. The name is in the checksum so that the embeddings of one item cannot be taken for those of another.

_HEAD = struct.Struct("<4sB3x16s")
_MAGIC = b"HRME"
_VERSION = 1


class DamagedEmbeddings(Exception):
    """A record is not that of the embeddings that were asked for, or not as it was written."""


def seal(name: str, data: bytes) -> bytes:
    """Return the record of embeddings."""
    return b"".join((_HEAD.pack(_MAGIC, _VERSION, _checksum(name, data)), data))


def unseal(name: str, record: bytes) -> bytes:
    """Return the embeddings of a record. Raises DamagedEmbeddings unless it is theirs, and whole."""
    if len(record) < _HEAD.size:
        raise DamagedEmbeddings(f"embeddings {name}: a record of {len(record)} bytes has no head")
    magic, version, checksum = _HEAD.unpack_from(record)
    if (magic, version) != (_MAGIC, _VERSION):
        raise DamagedEmbeddings(f"embeddings {name}: the record begins with {magic!r}, version {version}")
    data = record[_HEAD.size :]
    if checksum != _checksum(name, data):
        raise DamagedEmbeddings(f"embeddings {name}: the checksum does not fit")
    return data


def _checksum(name: str, data: bytes) -> bytes:
    digest = xxhash.xxh3_128(name.encode())
    digest.update(b"\0")
    digest.update(data)
    return digest.digest()


log = structlog.get_logger()

AT_ONCE = 4  # items that are read, encoded or stored at a time
MOST_WAITING = 64  # items; who comes then encodes by itself
TOLD = 300  # characters of an error

Answer = Callable[[MediaEncoded], None]


class Lending(Protocol):
    """Memory that serving workers read (`headrace.workers.encoding.lending.LentMemory`)."""

    def find(self, name: str) -> LentRecord | None: ...
    async def lend(self, name: str, record: bytes) -> LentRecord | None: ...
    async def record(self, lent: LentRecord) -> bytes: ...


class NothingLent:
    """The lending of a worker without such memory."""

    def find(self, name: str) -> None:
        return

    async def lend(self, name: str, record: bytes) -> None:
        return

    async def record(self, lent: LentRecord) -> bytes:
        raise BrokerError("nothing is lent here")


class EncodeServer:
    """Implements `headrace.broker.worker.ports.EncodePort`. Jobs are accepted while `run` runs."""

    def __init__(
        self,
        encoder: MediaEncoder,
        word: str,
        messaging: Messaging,
        subjects: Subjects,
        *,
        pool: str,
        lending: Lending | None = None,
    ) -> None:
        """`word`: the engine's `EngineInfo.encoder`. Without `lending` all goes by the object store."""
        self._lending = lending or NothingLent()
        self._encoder = encoder
        self._word = word
        self._messaging = messaging
        self._subjects = subjects
        self._objects = messaging.objects(subjects.pool_bucket(EMBEDDINGS, pool))
        self._tasks = TaskScope()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._asked: dict[str, list[tuple[int, Answer]]] = {}  # what each reads at once, and how it is told

    async def run(self) -> None:
        async with self._tasks:
            await asyncio.Event().wait()

    def begin(self, job: EncodeMedia, answer: Answer) -> None:
        """Begin a job, or join the one that has the same name. `answer` is called once, at the latest at its end."""
        if job.name in self._asked:
            metrics.ENCODES.labels("joined").inc()
            self._asked[job.name].append((job.reads, answer))
        elif not self._tasks.is_open or len(self._asked) >= MOST_WAITING:
            metrics.ENCODES.labels("refused").inc()
            answer(MediaEncoded(ok=False, message=f"{len(self._asked)} items wait here already"))
        else:
            self._asked[job.name] = [(job.reads, answer)]
            self._tasks.spawn_guarded(self._serve(job), lambda error: self._failed(job, f"{type(error).__name__}: {error}"))

    async def _serve(self, job: EncodeMedia) -> None:
        try:
            async with self._slots:
                lent = self._lending.find(job.name)
                result = "encoded" if lent is None else "kept"
                if lent is None:
                    record = await self._encode(job)
                    lent = await self._lending.lend(job.name, record)
                    if lent is None:
                        await self._objects.put(job.name, record)
                if lent is not None:
                    await self._store_for_others(job, lent)
        except HeadraceError as error:
            self._failed(job, str(error) or type(error).__name__)
            return
        self._end(job, result, lent)

    async def _store_for_others(self, job: EncodeMedia, lent: LentRecord) -> None:
        """Store a lent record too if one who asks for it cannot read it. Who joins meanwhile finds it in either place."""
        if any(reads < lent.size for reads, _ in self._asked[job.name]):
            await self._objects.put(job.name, await self._lending.record(lent))

    async def _encode(self, job: EncodeMedia) -> bytes:
        payload = await fetch_payload(self._messaging, self._subjects, job, wanted=lambda: self._tasks.is_open)
        generation = decode(Generation, payload)
        if job.item >= len(generation.media):
            raise BrokerError(f"request {job.id} has {len(generation.media)} media items, and none with the number {job.item}")
        item = generation.media[job.item]
        kind, data = item.get("kind"), item.get("data")
        if not isinstance(kind, str) or not isinstance(data, bytes):
            raise BrokerError(f"media item {job.item} of request {job.id} has no kind or no data")
        # Else one request could put the embeddings of its own item where those of another one are looked for.
        if await asyncio.to_thread(object_name, self._word, generation.cache_salt, kind, data) != job.name:
            raise BrokerError(f"media item {job.item} of request {job.id} is not the one that its name says")
        wanted: dict[str, Any] = {name: item[name] for name in ("kind", "data", "type", "param") if name in item}
        began_s = asyncio.get_running_loop().time()
        embeddings = await self._encoder.encode(wanted)
        metrics.ENCODE_S.observe(asyncio.get_running_loop().time() - began_s)
        return await asyncio.to_thread(seal, job.name, embeddings)

    def _end(self, job: EncodeMedia, result: str, lent: LentRecord | None) -> None:
        metrics.ENCODES.labels(result).inc()
        for reads, answer in self._asked.pop(job.name, ()):
            answer(MediaEncoded(ok=True, lent=lent if lent is not None and reads >= lent.size else None))

    def _failed(self, job: EncodeMedia, failure: str) -> None:
        metrics.ENCODES.labels("failed").inc()
        log.warning("encode.failed", request_id=job.id, item=job.item, error=failure[:TOLD])
        for _, answer in self._asked.pop(job.name, ()):
            answer(MediaEncoded(ok=False, message=failure[:TOLD]))
