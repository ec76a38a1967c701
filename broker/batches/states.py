"""Decides which states a batch may go to. States only move on, and the first compare-and-set wins."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.broker.batches.errors import BatchChangeRefused
from headrace.broker.batches.record import BatchRecord, BatchStatus

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
    """Return the record in another state, with the time at which it got there. Raises BatchChangeRefused."""
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
    """Return True if the batch has to be closed because its completion window is over."""
    return record.status in ("validating", "in_progress") and now >= record.expires_at
