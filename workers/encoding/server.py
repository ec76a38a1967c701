"""Runs the encoder for serving workers: an item of theirs becomes a record that they all find by the item's content.

A large record lies in memory that they read; a small one, and one for a worker that cannot read it, in the object store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from headrace.base.errors import HeadraceError
from headrace.broker.codec import decode
from headrace.broker.errors import BrokerError
from headrace.broker.messages import Generation
from headrace.broker.messages.encoding import EncodeMedia, LentRecord, MediaEncoded
from headrace.broker.spill import fetch_payload
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import EMBEDDINGS
from headrace.workers import metrics
from headrace.workers.encoding.names import object_name
from headrace.workers.encoding.record import seal
from headrace.workers.engine import MediaEncoder

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
        """Serve until cancelled."""
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
