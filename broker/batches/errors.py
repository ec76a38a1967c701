"""Defines every exception that can leave `broker/batches/`.

BrokerError
└── BatchesError
    ├── BatchUnknown           no batch of that id is stored for the tenant
    ├── BatchChangeRefused     the batch is in a state from which it cannot go to the wanted one
    ├── BatchQuotaExceeded     the tenant has as many batches as it may
    ├── BatchRateExceeded      the tenant has created as many batches in the last hour as it may
    ├── InputUnfit             a file can be no batch's input: its purpose or its size
    ├── InputInvalid           an input file is no batch: has the errors, with their lines; never leaves the batch's owner
    └── InputGone              the input file is not stored any more, or is not the one that was validated
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.broker.batches.record import LineError
from headrace.broker.errors import BrokerError


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
