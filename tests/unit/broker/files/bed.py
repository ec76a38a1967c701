"""Stores of files over memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from headrace.broker.files.records import FileLimits, FileRecord
from headrace.broker.files.store import FileDraft, FileStore, FileSweeper
from headrace.broker.files.uploads import UploadStore
from headrace.jetstream.subjects import Subjects
from tests.support.memory_store import MemoryClock, MemoryMessaging

SMALL = FileLimits(file_bytes=100, batch_bytes=50, tenant_files=4, tenant_bytes=200, part_bytes=40, parts=5)


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


class Bed:
    def __init__(self, limits: FileLimits = SMALL) -> None:
        self.clock = MemoryClock()
        messaging: Any = MemoryMessaging(self.clock)
        subjects = Subjects("hr")
        self.files = FileStore(messaging, subjects, limits, now=self.clock)
        self.uploads = UploadStore(messaging, subjects, self.files, now=self.clock)
        self.sweeper = FileSweeper(messaging, subjects, now=self.clock)
        self.records = messaging.bucket("hr_files")
        self.objects = messaging.objects("hr_files")

    async def add(self, data: bytes = b"data", *, tenant: str = "t", purpose: str = "user_data", **more: Any) -> FileRecord:
        self.clock.at += 1
        draft = FileDraft(tenant=tenant, filename="f.jsonl", purpose=purpose, **more)
        return await self.files.create(draft, pieces(data[:3], data[3:]))

    async def content(self, record: FileRecord, **span: int) -> bytes:
        return b"".join([piece async for piece in self.files.read(record, **span)])
