"""Defines the requests and answers of the routes over batches, and the events of webhooks, in OpenAI's shapes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.broker.batches.record import BatchRecord
from headrace.frontend.schema.answers import CachedTokens, CompletionTokens
from headrace.frontend.schema.stored import ExpiresAfter, Metadata, Page

Endpoint = Literal["/v1/responses", "/v1/chat/completions", "/v1/embeddings", "/v1/completions"]
BatchState = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


class NewBatchRequest(msgspec.Struct, kw_only=True):
    """A batch to be made of an uploaded file. Beside `24h` windows from `1m` to `7d` are taken."""

    input_file_id: Annotated[str, Meta(min_length=1, max_length=128)]
    endpoint: Endpoint
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchError(msgspec.Struct, kw_only=True):
    """An error of an input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    """The errors of an input file."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class BatchCounts(msgspec.Struct, kw_only=True):
    """Requests of a batch by their results."""

    total: int
    completed: int
    failed: int


class BatchUsage(msgspec.Struct, kw_only=True):
    """Tokens of all requests that have a result."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: CompletionTokens
    total_tokens: int


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchState
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: BatchUsage
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, record: BatchRecord) -> BatchObject:
        """Return a batch as clients see it."""
        errors = [BatchError(code=e.code, message=e.message, line=e.line, param=e.param) for e in record.errors]
        counts, tokens = record.counts, record.tokens
        return cls(
            id=record.id,
            endpoint=record.endpoint,
            model=record.model or None,
            errors=BatchErrors(data=errors) if errors else None,
            input_file_id=record.input_file_id,
            completion_window=record.completion_window,
            status="finalizing" if record.status == "expiring" else record.status,
            output_file_id=record.output_file_id,
            error_file_id=record.error_file_id,
            created_at=int(record.created),
            in_progress_at=record.in_progress_at,
            expires_at=record.expires_at,
            finalizing_at=record.finalizing_at if record.expiring_at is None else record.expiring_at,
            completed_at=record.completed_at,
            failed_at=record.failed_at,
            expired_at=record.expired_at,
            cancelling_at=record.cancelling_at,
            cancelled_at=record.cancelled_at,
            request_counts=BatchCounts(total=counts.total, completed=counts.completed, failed=counts.failed),
            usage=BatchUsage(
                input_tokens=tokens.prompt,
                input_tokens_details=CachedTokens(cached_tokens=tokens.cached),
                output_tokens=tokens.completion,
                output_tokens_details=CompletionTokens(reasoning_tokens=tokens.reasoning),
                total_tokens=tokens.prompt + tokens.completion,
            ),
            metadata=record.metadata,
        )


class BatchList(Page, kw_only=True):
    """A page of batches."""

    data: list[BatchObject]


SCHEMAS = (NewBatchRequest, BatchObject, BatchList)


class EventData(msgspec.Struct, kw_only=True):
    """The batch that an event is about."""

    id: str


class BatchEvent(msgspec.Struct, kw_only=True):
    """The end of a batch, as it is posted to a webhook."""

    id: str
    object: Literal["event"] = "event"
    created_at: int
    type: str
    data: EventData
