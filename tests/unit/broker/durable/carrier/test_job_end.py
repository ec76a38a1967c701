"""What is told of a job once its result was seen."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.broker.durable.carrier.job_end import JobEnder
from headrace.broker.messages import JobResult, JobStatus
from tests.unit.broker.durable.carrier.test_crash_writer import Deps, plain_job
from tests.unit.broker.durable.fakes import FakeStreams


class Notices:
    """Counts what is told."""

    told = 0

    def finished(self, *_: Any) -> None:
        self.told += 1


class Rendered:
    """Counts how often its tokens are counted."""

    counted = 0

    def settled(self) -> None:
        self.counted += 1


@pytest.mark.parametrize("status", ["done", "failed", "cancelled", "expired"])
async def test_the_tokens_of_a_job_that_was_run_are_counted_with_its_ack_however_it_ended(status: JobStatus) -> None:
    streams = FakeStreams()
    held = plain_job(streams)
    held.rendered = rendered = Rendered()  # type: ignore[assignment]
    acked: list[int] = []
    held.delivery.ack = lambda: acked.append(1)  # type: ignore[method-assign]
    deps: Any = Deps(streams)
    deps.notices, deps.wall = Notices(), lambda: 5.0
    JobEnder(deps).settle(held, JobResult(id="j", status=status))
    assert (len(acked), deps.notices.told, rendered.counted) == (1, 1, 1)
