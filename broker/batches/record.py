"""Defines the record of a batch, as it is stored in the bucket `<prefix>_batches`.

It has the fields of OpenAI's Batch object, and those that its owner needs: they are never shown to clients.
"""

from __future__ import annotations

import secrets
from typing import Literal

import msgspec

from headrace.broker.messages import WIRE_VERSION, ResultTokens

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expiring", "expired", "cancelling", "cancelled"
]
NoticeState = Literal["none", "due", "sent", "given_up"]

PREFIX = "batch_"
NOBODY = ""  # the owner of a batch that was given up: any frontend may take it at once


class LineError(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An error of an input file; `line` counts from 1, and is absent where the whole file is meant."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class LineCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a batch by their results, as they were last seen."""

    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def open(self) -> int:
        """The lines without a result."""
        return self.total - self.completed - self.failed


class BatchRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A batch. Times are Unix times in seconds; those of states that it has not been in are None.

    `cursor` counts lines, in the order in which they are published (`headrace.broker.batches.plan`), that are known to be
    stored as jobs. `tries` are the nonces of the tries to write its files, the last one last.
    """

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created: float
    expires_at: int
    v: int = msgspec.field(default_factory=lambda: WIRE_VERSION)
    status: BatchStatus = "validating"
    metadata: dict[str, str] | None = None
    output_expires_s: int | None = None
    errors: list[LineError] = []
    model: str = ""
    counts: LineCounts = LineCounts()
    tokens: ResultTokens = ResultTokens()
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expiring_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    owner: str = ""  # the ingress that carries it on
    plan: int = 0  # the version of the order in which its lines are published
    input_digest: str = ""  # of the plan: another file under the same id would have another
    cursor: int = 0
    prompt_tokens: int = 0  # an estimate over all lines
    tries: list[str] = []
    notice: NoticeState = "none"  # of its end, to the webhook
    notice_tries: int = 0

    @property
    def queued(self) -> int:
        """The lines that count against the tenant's quota: those without a result, while the batch has not ended."""
        return 0 if self.final else self.counts.open

    @property
    def queued_tokens(self) -> int:
        """The estimated prompt tokens of the lines without a result."""
        return self.prompt_tokens * self.queued // max(1, self.counts.total)

    @property
    def final(self) -> bool:
        """True if the batch has ended."""
        return self.status in FINAL


FINAL: frozenset[BatchStatus] = frozenset({"completed", "failed", "expired", "cancelled"})


def new_batch_id() -> str:
    """Return an id for a batch."""
    return f"{PREFIX}{secrets.token_hex(16)}"


def is_batch_id(value: str) -> bool:
    """Return True if `value` has the form of a batch's id."""
    rest = value.removeprefix(PREFIX)
    return len(rest) == 32 and rest != value and not rest.strip("0123456789abcdef")


def line_name(batch_id: str, number: int) -> str:
    """Return the publisher's id of a line's job; lines count from 1 in the order of the file."""
    return f"{batch_id}-{number}"
