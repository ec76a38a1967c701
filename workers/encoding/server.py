"""Runs the encoder for serving workers: an item of theirs becomes an object that they all find by the item's content."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from headrace.broker.codec import decode
from headrace.broker.errors import BrokerError
from headrace.broker.messages import Generation
from headrace.broker.messages.encoding import EncodeMedia, MediaEncoded
from headrace.broker.spill import fetch_payload
from headrace.jetstream.errors import HeadraceError
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


class EncodeServer:
    """Implements `headrace.broker.worker.ports.EncodePort`. Jobs are accepted while `run` runs."""

    def __init__(self, encoder: MediaEncoder, word: str, messaging: Messaging, subjects: Subjects, *, pool: str) -> None:
        """`word`: the engine's `EngineInfo.encoder`."""
        self._encoder = encoder
        self._word = word
        self._messaging = messaging
        self._subjects = subjects
        self._objects = messaging.objects(subjects.pool_bucket(EMBEDDINGS, pool))
        self._tasks = TaskScope()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._asked: dict[str, list[Answer]] = {}

    async def run(self) -> None:
        """Serve until cancelled."""
        async with self._tasks:
            await asyncio.Event().wait()

    def begin(self, job: EncodeMedia, answer: Answer) -> None:
        """Begin a job, or join the one that has the same name. `answer` is called once, at the latest at its end."""
        if job.name in self._asked:
            metrics.ENCODES.labels("joined").inc()
            self._asked[job.name].append(answer)
        elif not self._tasks.is_open or len(self._asked) >= MOST_WAITING:
            metrics.ENCODES.labels("refused").inc()
            answer(MediaEncoded(ok=False, message=f"{len(self._asked)} items wait here already"))
        else:
            self._asked[job.name] = [answer]
            self._tasks.spawn_guarded(self._serve(job), lambda error: self._end(job, f"{type(error).__name__}: {error}"))

    async def _serve(self, job: EncodeMedia) -> None:
        failure = ""
        try:
            async with self._slots:
                await self._encode(job)
        except HeadraceError as error:
            failure = str(error) or type(error).__name__
        self._end(job, failure)

    async def _encode(self, job: EncodeMedia) -> None:
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
        await self._objects.put(job.name, await asyncio.to_thread(seal, job.name, embeddings))

    def _end(self, job: EncodeMedia, failure: str) -> None:
        metrics.ENCODES.labels("failed" if failure else "encoded").inc()
        if failure:
            log.warning("encode.failed", request_id=job.id, item=job.item, error=failure[:TOLD])
        for answer in self._asked.pop(job.name, ()):
            answer(MediaEncoded(ok=not failure, message=failure[:TOLD]))
