"""A durable stream that is submitted again goes on from what was appended, without waiting for what is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.broker.durable import job_run
from headrace.broker.durable.held_job import HeldJob
from headrace.broker.durable.job_run import JobRunner
from headrace.broker.durable.stored_job import parse_job
from headrace.broker.messages.durable import HEADER_JOB, HEADER_STREAM
from headrace.broker.messages.frames import Row
from headrace.jetstream.ports import StoredMessage
from headrace.jetstream.subjects import Subjects
from tests.unit.broker.durable.carrier.test_crash_writer import Deps
from tests.unit.broker.durable.carrier.test_held_job import FakeDelivery
from tests.unit.broker.durable.fakes import FakeStreams

SUBJECT = "hr.rsp.t.j"


async def stream_of_two(streams: FakeStreams) -> HeldJob:
    job = parse_job(b"{}", {HEADER_JOB: "j", HEADER_STREAM: "1"}, tenant="t", seq=1, stored=0.0)
    held = HeldJob(job, "m", FakeDelivery(1), streams, Subjects("hr"), nonce="n")  # type: ignore[arg-type]
    await held.writer.append("take", carrier="c")
    await held.writer.append("rows", rows=[row(0)], events=[b"0"], first_event=0)
    return held


def row(offset: int) -> Row:
    return Row(id="", attempt=1, run=0, choice=0, offset=offset, ids=[offset], texts=["t"])


def runner(streams: FakeStreams) -> Any:
    return JobRunner(Deps(streams), None, lambda: None)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_run, "READ_AGAIN_S", 0.0)


async def test_it_goes_on_from_what_was_appended() -> None:
    streams = FakeStreams()
    held = await stream_of_two(streams)
    await runner(streams)._read_again(held)
    assert (held.stored.emitted, held.stored.events) == ({0: [0]}, 1)


async def test_an_old_read_is_repeated_while_the_leader_has_the_entry() -> None:
    streams = FakeStreams()
    held = await stream_of_two(streams)
    real, reads = streams.subject_messages, 0

    async def old_at_first(*args: Any, **options: Any) -> list[StoredMessage]:
        nonlocal reads
        reads += 1
        return (await real(*args, **options))[: 1 if reads < 4 else None]

    streams.subject_messages = old_at_first  # type: ignore[method-assign]
    await runner(streams)._read_again(held)
    assert (reads, held.stored.emitted) == (4, {0: [0]})


async def test_entries_that_are_lost_are_not_waited_for() -> None:
    streams = FakeStreams()
    held = await stream_of_two(streams)
    del streams.messages[1]
    async with asyncio.timeout(5):
        await runner(streams)._read_again(held)
    assert (held.stored.emitted, held.writer.last_seq) == ({}, 1)
    await held.writer.append("ok")


async def test_a_job_that_has_to_end_does_not_wait_for_its_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_run, "READ_AGAIN_S", 3600.0)
    streams = FakeStreams()
    held = await stream_of_two(streams)
    del streams.messages[1]
    held.halt("cancelled")
    async with asyncio.timeout(5):
        await runner(streams)._read_again(held)
