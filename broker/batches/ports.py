"""Ports of batches: files, results of lines, cancellation, leases, and the notice of a batch's end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

import msgspec

from headrace.broker.batches.record import BatchRecord
from headrace.broker.messages import JobResult, ResultResponse


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
    """Results of jobs (`headrace.broker.durable.result_store.ResultStore`). All methods raise JetStreamError."""

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
