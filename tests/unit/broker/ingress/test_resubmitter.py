"""Open requests that are submitted again after a lapse of their ingress's lease."""

from __future__ import annotations

import msgspec

from headrace.broker.codec import encode, parse_job_headers
from headrace.broker.ingress.resubmitter import Resubmitter
from headrace.broker.messages import HistoryEntry
from headrace.broker.protocol.resume import GENERATION
from headrace.broker.settings import Timing
from headrace.jetstream.errors import NotConnected
from tests.support.ingress_parts import SUBJECTS, Parts


def resubmitter(parts: Parts) -> Resubmitter:
    return Resubmitter(
        parts.messages,  # type: ignore[arg-type]
        SUBJECTS,
        parts.judge,
        parts.open,
        parts.tasks,
        timing=Timing(retry_s=0.0),
        wall=lambda: 0.0,
    )


async def test_a_lease_gained_after_a_lapse_submits_open_requests_once_as_a_new_generation() -> None:
    parts = Parts()
    parts.record.history = {HistoryEntry(1, "w")}
    again = resubmitter(parts)
    async with parts.tasks:
        again.on_gained()
        again.on_lapse()
        again.on_gained()
        again.on_gained()
    assert [subject for subject, _ in parts.messages.published] == [SUBJECTS.req("p", "re", "_")]
    assert parse_job_headers(parts.messages.headers[0]) == (GENERATION, [HistoryEntry(1, "w")])


async def test_a_batch_request_is_submitted_again_behind_interactive_ones() -> None:
    parts = Parts()
    job = parts.open.get("r")
    assert job is not None
    batch = msgspec.structs.replace(job.envelope(), request_class="batch")
    parts.open.add(msgspec.structs.replace(job, body=encode(batch)))
    async with parts.tasks:
        resubmitter(parts).resubmit()
    assert [subject for subject, _ in parts.messages.published] == [SUBJECTS.req("p", "rb", "_")]


async def test_a_request_that_ends_meanwhile_is_not_submitted_again() -> None:
    parts = Parts()
    again = resubmitter(parts)
    parts.messages.failing = [NotConnected("away")]
    async with parts.tasks:
        again.resubmit()
        parts.judge.close("r", None)
    assert parts.messages.published == []


async def test_an_ingress_that_does_not_run_submits_nothing_and_keeps_the_lapse_in_mind() -> None:
    parts = Parts()
    again = resubmitter(parts)
    again.on_lapse()
    again.on_gained()
    assert parts.messages.published == []
    async with parts.tasks:
        again.on_gained()
    assert len(parts.messages.published) == 1
