"""The surroundings of batches in memory: buckets, jobs, results and files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from headrace.broker.batches.batch_run import BatchParts
from headrace.broker.batches.fan_out import FanOut, ScratchSpace
from headrace.broker.batches.record import BatchRecord, InputGone
from headrace.broker.batches.results import SeenResults
from headrace.broker.batches.settings import BatchSettings
from headrace.broker.batches.store import BatchStore, EndNotice, InputFile
from headrace.broker.batches.validation import InputLimits
from headrace.broker.messages.durable import JobResult, ResultResponse
from headrace.jetstream.errors import JetStreamError, RevisionConflict
from headrace.jetstream.ports import Change, Entry, Outgoing, PubAck
from headrace.jetstream.subjects import Subjects
from tests.support.grouped_publishes import publish_each

SUBJECTS = Subjects("hr")


class MemoryBucket:
    """A bucket; its watches report changes at once."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[bytes, int]] = {}
        self.ttls: dict[str, float | None] = {}
        self.revision = 0
        self._watches: list[Callable[[Change], None]] = []

    async def get(self, key: str) -> Entry | None:
        found = self.values.get(key)
        return Entry(key, *found) if found is not None else None

    async def create(self, key: str, value: bytes, *, ttl_s: float | None = None, unmarked: bool = False) -> int:
        return await self.update(key, value, revision=0, ttl_s=ttl_s)

    async def update(self, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
        if self.values.get(key, (b"", 0))[1] != revision:
            raise RevisionConflict(key)
        self.revision += 1
        self.values[key] = (value, self.revision)
        self.ttls[key] = ttl_s
        for watch in self._watches:
            watch(Change(key, value, self.revision))
        return self.revision

    async def entries(self, pattern: str = ">") -> list[Entry]:
        wanted = pattern.replace(">", "*")
        return [Entry(key, *found) for key, found in self.values.items() if fnmatchcase(key, wanted)]

    def watch(self, on_change: Callable[[Change], None], pattern: str = ">") -> MemoryWatch:
        self._watches.append(on_change)
        return MemoryWatch(self, on_change)


class MemoryWatch:
    """Reports what is there, then the bucket does."""

    def __init__(self, bucket: MemoryBucket, on_change: Callable[[Change], None]) -> None:
        self._bucket = bucket
        self._on_change = on_change

    async def run(self) -> None:
        for key, (value, revision) in self._bucket.values.items():
            self._on_change(Change(key, value, revision))
        await asyncio.Future()


class MemoryMessaging:
    """Keeps what is published. `refuse` is asked before each publish and may raise."""

    def __init__(self) -> None:
        self.buckets: dict[str, MemoryBucket] = {}
        self.published: list[tuple[str, bytes, dict[str, str], str | None]] = []
        self.refuse: Callable[[], None] = lambda: None

    def bucket(self, name: str) -> MemoryBucket:
        return self.buckets.setdefault(name, MemoryBucket())

    async def publish(
        self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None, msg_id: str | None = None
    ) -> PubAck:
        await asyncio.sleep(0)
        self.refuse()
        self.published.append((subject, data, dict(headers or {}), msg_id))
        return PubAck("HR_JOB", len(self.published))

    async def publish_all(self, messages: Sequence[Outgoing], **_: float) -> list[PubAck | JetStreamError]:
        return await publish_each(self.publish, messages)


class MemoryResults:
    """Results by token; what `lag` names is not seen at the first look."""

    def __init__(self) -> None:
        self.stored: dict[str, JobResult] = {}
        self.lag: set[str] = set()
        self.lost: Exception | None = None

    async def get_many(self, tenant: str, tokens: Sequence[str]) -> Mapping[str, JobResult]:
        found = {token: self.stored[token] for token in tokens if token in self.stored and token not in self.lag}
        self.lag -= set(tokens)
        return found

    async def commit(self, tenant: str, token: str, result: JobResult) -> JobResult:
        return self.stored.setdefault(token, result)

    async def response(self, result: JobResult) -> ResultResponse | None:
        if self.lost is not None:
            raise self.lost
        return result.response


class MemoryFiles:
    """Files by tenant and id."""

    def __init__(self) -> None:
        self.stored: dict[tuple[str, str], bytes] = {}
        self.purpose = "batch"
        self.paused: asyncio.Event | None = None  # writers wait for it once they have written
        self.waiting = False

    async def facts(self, tenant: str, file_id: str) -> InputFile:
        return InputFile(size=len(self._get(tenant, file_id)), purpose=self.purpose)

    async def read(self, tenant: str, file_id: str, *, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        data = self._get(tenant, file_id)
        yield data[offset:] if length is None else data[offset : offset + length]

    async def write(self, record: BatchRecord, file_id: str, filename: str, chunks: AsyncIterator[bytes]) -> None:
        self.stored[record.tenant, file_id] = b"".join([chunk async for chunk in chunks])
        if self.paused is not None:
            self.waiting = True
            await self.paused.wait()

    async def delete(self, tenant: str, file_id: str) -> None:
        self.stored.pop((tenant, file_id), None)

    def _get(self, tenant: str, file_id: str) -> bytes:
        if (tenant, file_id) not in self.stored:
            raise InputGone(f"there is no file {file_id!r}")
        return self.stored[tenant, file_id]


class Stopped:
    """Keeps the names of the jobs that were stopped."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def stop(self, record: BatchRecord, names: Sequence[str]) -> None:
        self.names += names


class Scene:
    """All of them together. `now` is the Unix time."""

    def __init__(self, **settings: Any) -> None:
        self.messaging = MemoryMessaging()
        self.files = MemoryFiles()
        self.results = MemoryResults()
        self.stopped = Stopped()
        self.settings = BatchSettings(**settings)
        self.store = BatchStore(self.messaging, SUBJECTS, keep_s=100.0)  # type: ignore[arg-type]
        self.now = 1000.0
        self.notice: EndNotice | None = None
        self.scratch: ScratchSpace | None = None
        self.seen: SeenResults | None = None

    def parts(self) -> BatchParts:
        return BatchParts(
            store=self.store,
            files=self.files,
            results=self.results,
            fan_out=FanOut(self.messaging, SUBJECTS, self.files),  # type: ignore[arg-type]
            stopper=self.stopped,
            notice=self.notice,
            settings=self.settings,
            limits=InputLimits(),
            others=list,
            scratch=self.scratch,
            seen=self.seen,
            wall=lambda: self.now,
        )
