"""Trying again until it works."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from headrace.broker.retry import until_done
from headrace.jetstream.errors import JetStreamError


class Attempts:
    """The first `failures` fail."""

    def __init__(self, failures: int, error: type[Exception] = JetStreamError) -> None:
        self.left, self.error, self.made = failures, error, 0

    async def __call__(self) -> None:
        self.made += 1
        if self.left:
            self.left -= 1
            raise self.error("no answer")


async def test_it_is_tried_until_it_works_and_each_failure_is_logged() -> None:
    attempts = Attempts(2)
    with capture_logs() as logs:
        await until_done(attempts, event="thing.retry", retry_s=0.0, worker="w")
    assert attempts.made == 3
    assert [(log["event"], log["worker"], log["error"]) for log in logs] == [("thing.retry", "w", "no answer")] * 2


async def test_what_is_not_wanted_any_more_is_not_tried_again() -> None:
    attempts = Attempts(9)
    await until_done(attempts, event="thing.retry", retry_s=0.0, wanted=lambda: attempts.made < 2)
    assert attempts.made == 2


async def test_other_errors_are_the_callers() -> None:
    with pytest.raises(ValueError, match="no answer"):
        await until_done(Attempts(1, ValueError), event="thing.retry", retry_s=0.0)
