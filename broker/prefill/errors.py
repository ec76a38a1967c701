"""Why a prompt is not computed by another worker after all. Never leaves the decode worker: it computes the prompt itself."""

from __future__ import annotations

from typing import Literal, get_args

from headrace.broker.errors import BrokerError

FailReason = Literal[
    "queue_full",  # the prefill queue takes nothing more
    "broker",  # the job could not be stored, or nobody knows whether it was
    "not_taken",  # nobody took it in time
    "peer_lost",  # who took it does not answer any more
    "peer_failed",  # who took it says that it cannot
    "expired",  # the blocks are not kept long enough to be fetched
    "transfer_failed",  # the engine could not fetch them
    "transfer_timeout",  # … or did not, in time
    "deadline",
]
FAIL_REASONS: tuple[FailReason, ...] = get_args(FailReason)

ANOTHER_TRY: frozenset[FailReason] = frozenset({"peer_lost", "peer_failed", "expired", "transfer_failed"})
"""Another prefill worker may do better: the queue itself is not what failed."""


class PrefillFailed(BrokerError):
    """A hand-over came to nothing. `reason` is a metric label; `worker`: who had taken the job, if somebody had."""

    def __init__(self, reason: FailReason, message: str, *, worker: str = "") -> None:
        super().__init__(message)
        self.reason: FailReason = reason
        self.worker = worker
