"""Records of batches in their bucket, a view of all of them, and the ports that batches use."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec
import structlog

from headrace.broker import metrics
from headrace.broker.batches.record import BatchRecord, BatchUnknown, Closing, InputGone, closing, is_batch_id
from headrace.broker.codec import NOT_DECODED
from headrace.broker.files.errors import FileUnknown
from headrace.broker.files.store import FileDraft, FileStore
from headrace.broker.messages.durable import JobResult, ResultResponse
from headrace.jetstream.errors import RequestTimeout, SubjectError
from headrace.jetstream.ports import Change, Messaging
from headrace.jetstream.subjects import Subjects, check_token

log = structlog.get_logger()

READ_TIMEOUT_S = 5.0


class StoredBatch(msgspec.Struct, frozen=True):
    """A record and its revision."""

    record: BatchRecord
    revision: int


class BatchStore:
    """The records of all tenants. It caches none."""

    def __init__(self, messaging: Messaging, subjects: Subjects, *, keep_s: float) -> None:
        """`keep_s`: how long a record is kept after the end of its batch."""
        self._bucket = messaging.bucket(subjects.bucket("batches"))
        self._keep_s = keep_s

    async def create(self, record: BatchRecord) -> None:
        """Store a new batch. Raises JetStreamError."""
        await self._bucket.create(batch_key(record.tenant, record.id), msgspec.json.encode(record))

    async def read(self, tenant: str, batch_id: str) -> StoredBatch:
        """Read a batch from the server. Raises BatchUnknown, JetStreamError."""
        entry = await self._bucket.get(batch_key(tenant, batch_id)) if is_batch_id(batch_id) else None
        if entry is None:
            raise BatchUnknown(f"there is no batch {batch_id[:80]!r}")
        return StoredBatch(_record.decode(entry.value), entry.revision)

    async def replace(self, stored: StoredBatch, record: BatchRecord) -> StoredBatch:
        """Write a record over the one that was read. Raises RevisionConflict if another writer was first, JetStreamError.

        After a conflict or an unknown outcome the caller starts over from a new read.
        """
        ttl_s = self._keep_s if record.final else None
        key = batch_key(record.tenant, record.id)
        revision = await self._bucket.update(key, msgspec.json.encode(record), revision=stored.revision, ttl_s=ttl_s)
        return StoredBatch(record, revision)

    async def of_tenant(self, tenant: str) -> list[BatchRecord]:
        """Return the batches of a tenant, the newest first. Raises JetStreamError."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                entries = await self._bucket.entries(f"{check_token(tenant, 'tenant')}.*")
        except TimeoutError:
            raise RequestTimeout(f"the batches were not read within {READ_TIMEOUT_S:g} s") from None
        records = []
        for entry in entries:
            with contextlib.suppress(*NOT_DECODED):  # the view has logged it
                records.append(_record.decode(entry.value))
        return sorted(records, key=lambda r: (r.created, r.id), reverse=True)


class BatchView:
    """All batches as a watch has last reported them: for choices. Decisions take a fresh read."""

    def __init__(self, messaging: Messaging, subjects: Subjects) -> None:
        self._records: dict[str, BatchRecord] = {}  # by id
        self._changed = asyncio.Event()
        self._watch = messaging.bucket(subjects.bucket("batches")).watch(self._on_change)

    async def run(self) -> None:
        await self._watch.run()

    def closing(self, batch_id: str) -> Closing | None:
        record = self._records.get(batch_id)
        return closing(record.status) if record is not None else None

    def has(self, tenant: str, batch_id: str) -> bool:
        record = self._records.get(batch_id)
        return record is not None and record.tenant == tenant and not record.final

    async def changed(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def wake(self) -> None:
        self._changed.set()

    def records(self) -> Iterable[BatchRecord]:
        return self._records.values()

    def _on_change(self, change: Change) -> None:
        batch_id = change.key.rpartition(".")[2]
        if change.value is None:
            self._records.pop(batch_id, None)
        else:
            try:
                record = _record.decode(change.value)
                if batch_key(record.tenant, record.id) != change.key:
                    raise msgspec.ValidationError(f"it is the record of batch {record.id[:80]!r}")
                self._records[batch_id] = record
            except (*NOT_DECODED, SubjectError) as error:
                self._records.pop(batch_id, None)
                metrics.MALFORMED.labels("batch").inc()
                log.error("batch.malformed", batch=batch_id, error=str(error))
                return
        self._changed.set()


def batch_key(tenant: str, batch_id: str) -> str:
    return f"{check_token(tenant, 'tenant')}.{check_token(batch_id, 'batch')}"


_record = msgspec.json.Decoder(BatchRecord)


class InputFile(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a stored file that matter to a batch."""

    size: int
    purpose: str


class BatchFiles(Protocol):
    """Files of tenants. All methods raise InputGone for a file that the tenant does not have, and JetStreamError."""

    async def facts(self, tenant: str, file_id: str) -> InputFile:
        """Return the facts of a file."""

    def read(self, tenant: str, file_id: str, *, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """Yield the bytes of a file, or of a part of it."""

    async def write(self, record: BatchRecord, file_id: str, filename: str, chunks: AsyncIterator[bytes]) -> None:
        """Store a file of results under this id."""

    async def delete(self, tenant: str, file_id: str) -> None:
        """Delete a file; an absent one is fine."""


class LineResults(Protocol):
    """Results of jobs (`headrace.broker.durable.results.ResultStore`). All methods raise JetStreamError."""

    async def get_many(self, tenant: str, tokens: Sequence[str]) -> Mapping[str, JobResult]:
        """Return the results that are seen, by the tokens of their jobs."""

    async def commit(self, tenant: str, token: str, result: JobResult) -> JobResult:
        """Write a result unless there is one. Returns the one that stands, which was seen."""

    async def response(self, result: JobResult) -> ResultResponse | None:
        """Return the response of a result, read from its object if it is large; None where there is none."""


class JobStopper(Protocol):
    """Stops jobs whose results are written already."""

    async def stop(self, record: BatchRecord, names: Sequence[str]) -> None:
        """Tell carriers and workers to stop the jobs of these ids. It may be lost: carriers look at the ends of their jobs."""


class Leases(Protocol):
    """Leases of ingresses, one's own included."""

    @property
    def held(self) -> bool:
        """True while the lease of this process is held."""

    def ingress_live(self, ingress: str) -> bool:
        """Return True if the ingress holds a lease, as last reported."""

    async def ingress_gone(self, ingress: str) -> bool:
        """Return True if the ingress is gone, by a fresh read; False while that cannot be known."""


class EndNotice(Protocol):
    """Tells the operator's webhook of the ends of batches."""

    async def send(self, record: BatchRecord) -> bool:
        """Send the event of a batch's end once. Returns True if it was taken."""


PURPOSE = "batch_output"


class StoredFiles:
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
