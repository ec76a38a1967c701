"""Records of batches in the bucket `<prefix>_batches`, their states and errors, and the lines of their result files.

A record has the fields of OpenAI's Batch object, and private fields for its owner, which are never shown to clients.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from headrace.base.metrics import Counter, Gauge
from headrace.broker.codec import NOT_DECODED
from headrace.broker.errors import BrokerError
from headrace.broker.messages.durable import JobResult, ResultError, ResultResponse, ResultTokens
from headrace.broker.messages.requests import WIRE_VERSION

CARRIED = Gauge("headrace_batch_carried", "Batches that this frontend carries on")
TAKEN = Counter("headrace_batch_taken_total", "Batches taken over from a frontend that is gone")
GIVEN_UP = Counter("headrace_batch_given_up_total", "Batches that this frontend gave up because it drains")
ENDED = Counter("headrace_batch_ended_total", "Batches that this frontend has ended, by their status", ["status"])
LINES = Counter("headrace_batch_lines_total", "Lines of batches by what this frontend did with them", ["what"])
RETRIES = Counter("headrace_batch_retries_total", "Steps of a batch that failed and are done again", ["why"])
NOT_COPIED = Counter(
    "headrace_batch_inputs_not_copied_total", "Input files without a copy on the local disk, read from the store"
)
NOT_KEPT = Counter(
    "headrace_batch_results_not_kept_total", "Batches whose results could not be kept on the local disk, and are read twice"
)
NOTICES = Counter("headrace_batch_webhooks_total", "Webhook calls about ends of batches by outcome", ["outcome"])


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
    """Lines of a batch by their results, as last seen."""

    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def open(self) -> int:
        return self.total - self.completed - self.failed


class BatchRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A batch. Times are Unix times in seconds; those of states that it has not been in are None.

    `cursor` counts lines, in the order in which they are published (`headrace.broker.batches.validation`), that are known to be
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
        return self.prompt_tokens * self.queued // max(1, self.counts.total)

    @property
    def final(self) -> bool:
        return self.status in FINAL


FINAL: frozenset[BatchStatus] = frozenset({"completed", "failed", "expired", "cancelled"})


def new_batch_id() -> str:
    return f"{PREFIX}{secrets.token_hex(16)}"


def is_batch_id(value: str) -> bool:
    rest = value.removeprefix(PREFIX)
    return len(rest) == 32 and rest != value and not rest.strip("0123456789abcdef")


def line_name(batch_id: str, number: int) -> str:
    """Return the publisher's id of a line's job; lines count from 1 in the order of the file."""
    return f"{batch_id}-{number}"


# Defines every exception that can leave `broker/batches/`.
#
# BrokerError
# └── BatchesError
#     ├── BatchUnknown           no batch of that id is stored for the tenant
#     ├── BatchChangeRefused     the batch is in a state from which it cannot go to the wanted one
#     ├── BatchQuotaExceeded     the tenant has as many batches as it may
#     ├── BatchRateExceeded      the tenant has created as many batches in the last hour as it may
#     ├── InputUnfit             a file can be no batch's input: its purpose or its size
#     ├── InputInvalid           an input file is no batch: has the errors, with their lines; never leaves the batch's owner
#     └── InputGone              the input file is not stored any more, or is not the one that was validated


class BatchesError(BrokerError):
    """A batch failed."""


class BatchUnknown(BatchesError):
    """No batch of that id is stored."""


class BatchChangeRefused(BatchesError):
    """The batch cannot go to that state any more."""


class BatchQuotaExceeded(BatchesError):
    """The tenant has too many batches."""


class BatchRateExceeded(BatchesError):
    """The tenant has created too many batches in the last hour; one more may be created after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float = 60.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class InputUnfit(BatchesError):
    """The file cannot be the input of a batch."""


class InputInvalid(BatchesError):
    """The input file is no batch; `errors` has the reasons in the order of its lines."""

    def __init__(self, errors: Sequence[LineError]) -> None:
        super().__init__(errors[0].message if errors else None)
        self.errors = tuple(errors)


class InputGone(BatchesError):
    """The input file is not stored any more."""


NEXT: dict[BatchStatus, frozenset[BatchStatus]] = {
    "validating": frozenset({"failed", "in_progress", "cancelling", "expiring"}),
    "in_progress": frozenset({"finalizing", "cancelling", "expiring"}),
    "finalizing": frozenset({"completed"}),
    "cancelling": frozenset({"cancelled"}),
    "expiring": frozenset({"expired"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "expired": frozenset(),
    "cancelled": frozenset(),
}

Closing = Literal["cancelled", "expired"]

_CLOSING: dict[BatchStatus, Closing] = {
    "cancelling": "cancelled",
    "cancelled": "cancelled",
    "expiring": "expired",
    "expired": "expired",
}
_END: dict[BatchStatus, BatchStatus] = {"finalizing": "completed", "cancelling": "cancelled", "expiring": "expired"}


def move(record: BatchRecord, status: BatchStatus, *, now: float, **changes: Any) -> BatchRecord:
    """Return the record in another state, with the time of the change. Raises BatchChangeRefused."""
    if status not in NEXT[record.status]:
        raise BatchChangeRefused(f"batch {record.id} is {record.status} and cannot become {status}")
    return msgspec.structs.replace(record, status=status, **{f"{status}_at": int(now)}, **changes)


def closing(status: BatchStatus) -> Closing | None:
    """Return the end that lines without a result get in this state, None where they may run."""
    return _CLOSING.get(status)


def end_of(status: BatchStatus) -> BatchStatus:
    """Return the state that follows once the files are written. Raises KeyError for a state in which none are written."""
    return _END[status]


def overdue(record: BatchRecord, now: float) -> bool:
    return record.status in ("validating", "in_progress") and now >= record.expires_at


FileKind = Literal["output", "error"]

_ENDS = {
    "expired": ResultError(
        code="batch_expired", message="This request could not be executed before the completion window expired."
    ),
    "cancelled": ResultError(code="batch_cancelled", message="This request was not executed because the batch was cancelled."),
}


class OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    custom_id: str
    response: ResultResponse | None
    error: ResultError | None


def file_kind(result: JobResult) -> FileKind:
    """Return the file that a line belongs to: the output file has the answers of status 2xx, which jobs report as `done`."""
    return "output" if result.status == "done" else "error"


def output_line(name: str, result: JobResult, response: ResultResponse | None) -> bytes:
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    error = None if response is not None else result.error
    if response is None and error is None:
        error = ResultError(code=result.status, message=f"The request ended as {result.status}.")
    line = OutputLine(id=f"batch_req_{digest}", custom_id=result.custom_id, response=response, error=error)
    return msgspec.json.encode(line) + b"\n"


def closed_line(batch_id: str, number: int, custom_id: str, end: Closing, now: float) -> JobResult:
    return JobResult(id=line_name(batch_id, number), status=end, custom_id=custom_id, error=_ENDS[end], finished=now)


def large_line(batch_id: str, number: int, custom_id: str, now: float) -> JobResult:
    error = ResultError(code="line_too_long", message="The line is longer than a message of this server can carry.")
    return JobResult(id=line_name(batch_id, number), status="failed", custom_id=custom_id, error=error, finished=now)


def lost_line(name: str, result: JobResult) -> bytes:
    error = ResultError(code="result_lost", message="The response was stored, and cannot be read any more.")
    return output_line(name, msgspec.structs.replace(result, error=error), None)


def custom_id_of(line: bytes) -> str:
    """Return the client's id of an input line that was validated; empty if the line is not the one that was."""
    try:
        return _custom.decode(line).custom_id
    except NOT_DECODED:
        return ""


class _Custom(msgspec.Struct):
    custom_id: str


_custom = msgspec.json.Decoder(_Custom)


_OPEN, _DONE, _FAILED = 0, 1, 2


class LineProgress:
    def __init__(self, total: int) -> None:
        self._state = bytearray(total)
        self._done = self._failed = 0
        self._tokens = ResultTokens()
        self._out: dict[int, None] = {}  # an ordered set

    @property
    def out(self) -> list[int]:
        """The lines that were published, by this owner or an earlier one, without a result that was seen: the oldest first."""
        return list(self._out)

    @property
    def waiting(self) -> int:
        return len(self._out)

    @property
    def counts(self) -> LineCounts:
        return LineCounts(total=len(self._state), completed=self._done, failed=self._failed)

    @property
    def tokens(self) -> ResultTokens:
        return self._tokens

    @property
    def complete(self) -> bool:
        return self._done + self._failed == len(self._state)

    def publish(self, numbers: Iterable[int]) -> None:
        self._out.update((number, None) for number in numbers if not self._state[number - 1])

    def see(self, number: int, result: JobResult) -> None:
        """Note the result of a line. It never changes, so a second look changes nothing."""
        self._out.pop(number, None)
        if self._state[number - 1] != _OPEN:
            return
        if file_kind(result) == "output":
            self._state[number - 1] = _DONE
            self._done += 1
        else:
            self._state[number - 1] = _FAILED
            self._failed += 1
        mine, more = self._tokens, result.tokens
        self._tokens = ResultTokens(
            prompt=mine.prompt + more.prompt,
            cached=mine.cached + more.cached,
            completion=mine.completion + more.completion,
            reasoning=mine.reasoning + more.reasoning,
        )

    def open(self, numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if not self._state[number - 1]]

    def of_kind(self, kind: FileKind) -> Iterator[int]:
        wanted = _DONE if kind == "output" else _FAILED
        for i, state in enumerate(self._state):
            if state == wanted:
                yield i + 1
