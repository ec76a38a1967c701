"""Reads input files and writes result files of batches in the store of files."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from headrace.broker.batches.errors import InputGone
from headrace.broker.batches.ports import InputFile
from headrace.broker.batches.record import BatchRecord
from headrace.broker.files.errors import FileUnknown
from headrace.broker.files.store import FileDraft, FileStore

PURPOSE = "batch_output"


class StoredFiles:
    """The files of batches, over the store of all files."""

    def __init__(self, store: FileStore, *, output_ttl_s: float | None = None) -> None:
        """`output_ttl_s`: the life of result files whose batch names none."""
        self._store = store
        self._output_ttl_s = output_ttl_s

    async def facts(self, tenant: str, file_id: str) -> InputFile:
        try:
            record = await self._store.get(file_id, tenant)
        except FileUnknown as error:
            raise InputGone(str(error)) from None
        return InputFile(size=record.bytes, purpose=record.purpose)

    async def read(self, tenant: str, file_id: str, *, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        try:
            record = await self._store.get(file_id, tenant)
            async for chunk in self._store.read(record, offset=offset, length=length):
                yield chunk
        except FileUnknown as error:
            raise InputGone(str(error)) from None

    async def write(self, record: BatchRecord, file_id: str, filename: str, chunks: AsyncIterator[bytes]) -> None:
        life_s = record.output_expires_s or self._output_ttl_s
        draft = FileDraft(
            tenant=record.tenant,
            filename=filename,
            purpose=PURPOSE,
            life_s=int(life_s) if life_s is not None else None,
            origin=record.id,
            file_id=file_id,
        )
        await self._store.create(draft, chunks)

    async def delete(self, tenant: str, file_id: str) -> None:
        with contextlib.suppress(FileUnknown):
            await self._store.delete(file_id, tenant)
