"""Reasons why a hand-over failed. They stay in the decode worker, which then computes the prompt itself."""

from __future__ import annotations

from typing import Literal, get_args

from headrace.broker.errors import BrokerError

FailReason = Literal[
    "queue_full",  # the prefill queue takes nothing more
    "broker",  # the job could not be stored, or it is not known whether it was
    "not_taken",  # no worker took it in time
    "peer_lost",  # the worker that took it answers no more
    "peer_failed",  # the worker that took it says that it cannot
    "expired",  # the blocks are not kept long enough to be fetched
    "transfer_failed",  # the engine could not fetch them
    "transfer_timeout",  # the engine did not fetch them in time
    "deadline",
]
FAIL_REASONS: tuple[FailReason, ...] = get_args(FailReason)

ANOTHER_TRY: frozenset[FailReason] = frozenset({"peer_lost", "peer_failed", "expired", "transfer_failed"})
"""Reasons after which another prefill worker is tried, because it is not the queue that failed."""


class PrefillFailed(BrokerError):
    """A hand-over failed. `reason` is a metric label; `worker` had taken the job, and is empty if none had."""

    def __init__(self, reason: FailReason, message: str, *, worker: str = "") -> None:
        super().__init__(message)
        self.reason: FailReason = reason
        self.worker = worker
