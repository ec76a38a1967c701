"""What is told of a job once its result was seen."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.broker.durable.job_end import JobEnder
from headrace.broker.durable.names import JobRef
from headrace.broker.messages.durable import JobResult, JobStatus
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
    deps.notices, deps.results, deps.wall = Notices(), None, lambda: 5.0
    JobEnder(deps).settle(held, JobResult(id="j", status=status))
    assert (len(acked), deps.notices.told, rendered.counted) == (1, 1, 1)


class Batches:
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, JobStatus]] = []

    def see(self, job: JobRef, result: JobResult) -> None:
        self.seen.append((job.batch, result.status))


@pytest.mark.parametrize(("batch", "seen"), [("batch_1", [("batch_1", "failed")]), ("", [])])
async def test_the_result_of_a_line_is_shown_to_the_batches_of_this_process(batch: str, seen: list[Any]) -> None:
    streams = FakeStreams()
    held = plain_job(streams)
    held.ref = msgspec.structs.replace(held.ref, batch=batch)
    held.delivery.ack = lambda: None  # type: ignore[method-assign]
    deps: Any = Deps(streams)
    deps.notices, deps.results, deps.wall, deps.batches = Notices(), None, lambda: 5.0, Batches()
    JobEnder(deps).settle(held, JobResult(id="j", status="failed"))
    assert deps.batches.seen == seen
