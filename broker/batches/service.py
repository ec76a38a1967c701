"""Creates, reads, lists and cancels batches for the clients of a frontend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
import structlog

from headrace.broker.batches.errors import InputUnfit
from headrace.broker.batches.ports import BatchFiles
from headrace.broker.batches.quota import check_batches, check_rate
from headrace.broker.batches.record import NOBODY, BatchRecord, new_batch_id
from headrace.broker.batches.settings import BatchSettings
from headrace.broker.batches.states import move
from headrace.broker.batches.store import BatchStore
from headrace.broker.batches.windows import window_s
from headrace.jetstream.errors import RevisionConflict

log = structlog.get_logger()

PURPOSE = "batch"
CANCEL_TRIES = 16
PAUSE_S = 0.02


class NewBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The wishes of a batch's creator."""

    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_s: int | None = None


class Batches:
    """The batches of all tenants, as one frontend sees them."""

    def __init__(
        self,
        store: BatchStore,
        files: BatchFiles,
        settings: BatchSettings,
        *,
        me: str,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._files = files
        self._settings = settings
        self._me = me
        self._wall = wall

    def disown(self) -> None:
        """Create batches without an owner from now on: this process takes none."""
        self._me = NOBODY

    async def create(self, tenant: str, new: NewBatch) -> BatchRecord:
        """Store a batch, which is validated later.

        Raises ValueError for a wrong window, InputGone and InputUnfit for a file that can be no batch, BatchQuotaExceeded,
        BatchRateExceeded, JetStreamError.
        """
        length_s = window_s(new.completion_window)
        facts = await self._files.facts(tenant, new.input_file_id)
        if facts.purpose != PURPOSE:
            raise InputUnfit(f"The file's purpose is {facts.purpose!r}; it must be {PURPOSE!r}.")
        if facts.size > self._settings.max_file_bytes:
            most = self._settings.max_file_bytes
            raise InputUnfit(f"The file has {facts.size} bytes; a batch may have {most}.")
        others = await self._store.of_tenant(tenant)
        now = self._wall()
        check_batches(tenant, others, self._settings)
        check_rate(tenant, others, self._settings, now)
        record = BatchRecord(
            id=new_batch_id(),
            tenant=tenant,
            endpoint=new.endpoint,
            input_file_id=new.input_file_id,
            completion_window=new.completion_window,
            created=now,
            expires_at=int(now + length_s),
            metadata=new.metadata,
            output_expires_s=new.output_expires_s,
            owner=self._me,
        )
        await self._store.create(record)
        log.info("batch.created", batch=record.id, tenant=tenant)
        return record

    async def get(self, tenant: str, batch_id: str) -> BatchRecord:
        """Return a batch. Raises BatchUnknown, JetStreamError."""
        return (await self._store.read(tenant, batch_id)).record

    async def list(self, tenant: str) -> list[BatchRecord]:
        """Return the batches of a tenant, the newest first. Raises JetStreamError."""
        return await self._store.of_tenant(tenant)

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Begin to cancel a batch, and return it. One that writes its files already is let be, as every line has its result.

        Raises BatchUnknown, BatchChangeRefused if it has ended, JetStreamError.
        """
        for attempt in range(CANCEL_TRIES):
            stored = await self._store.read(tenant, batch_id)
            record = stored.record
            if record.status in ("cancelling", "finalizing", "expiring"):
                return record
            cancelled = move(record, "cancelling", now=self._wall())
            try:
                return (await self._store.replace(stored, cancelled)).record
            except RevisionConflict:
                await asyncio.sleep(PAUSE_S * attempt)
        raise RevisionConflict(f"batch {batch_id} was changed by its owner {CANCEL_TRIES} times meanwhile")
