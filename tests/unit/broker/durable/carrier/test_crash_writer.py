"""Crashes of a job are stored once, and never behind its end."""

from __future__ import annotations

import pytest

from headrace.broker.codec import decode, encode
from headrace.broker.durable.held_job import HeldJob
from headrace.broker.durable.job_run import CrashWriter
from headrace.broker.durable.stored_job import parse_job
from headrace.broker.durable.stream_writer import DurableStreamWriter
from headrace.broker.messages.control import HistoryEntry
from headrace.broker.messages.durable import HEADER_JOB, StreamEntry
from headrace.broker.settings import CarrierSettings, Timing
from headrace.jetstream.subjects import Subjects
from tests.unit.broker.durable.carrier.test_held_job import FakeDelivery
from tests.unit.broker.durable.fakes import FakeStreams

SUBJECT = "hr.rsp.t.j"
CRASH = HistoryEntry(1, "w", 0)


class Deps:
    """What a crash writer uses of its carrier."""

    def __init__(self, streams: FakeStreams) -> None:
        self.messaging = streams
        self.subjects = Subjects("hr")
        self.settings = CarrierSettings(timing=Timing(retry_s=0.001))


def plain_job(streams: FakeStreams) -> HeldJob:
    job = parse_job(b"{}", {HEADER_JOB: "j"}, tenant="t", seq=1, stored=0.0)
    return HeldJob(job, "m", FakeDelivery(1), streams, Subjects("hr"), nonce="n")  # type: ignore[arg-type]


def entries(streams: FakeStreams) -> list[StreamEntry]:
    return [decode(StreamEntry, message.data) for message in streams.of(SUBJECT)]


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.broker.durable.stream_writer.RETRY_S", 0.0)


async def test_a_crash_is_stored_before_it_is_said_to_be_recorded() -> None:
    streams = FakeStreams()
    writer = CrashWriter(Deps(streams), plain_job(streams))  # type: ignore[arg-type]
    assert not writer.recorded([CRASH])
    await writer.write()
    assert writer.recorded([CRASH])
    assert [entry.history for entry in entries(streams)] == [[CRASH]]


async def test_a_copy_of_a_plain_job_writes_behind_the_entries_of_another_copy() -> None:
    streams = FakeStreams()
    held = plain_job(streams)
    writer = CrashWriter(Deps(streams), held)  # type: ignore[arg-type]
    await DurableStreamWriter(streams, Subjects("hr"), "t", "j", nonce="other").append("take", carrier="x")  # type: ignore[arg-type]
    writer.recorded([CRASH])
    await writer.write()
    assert [entry.kind for entry in entries(streams)] == ["take", "crash"]


async def test_nothing_is_written_behind_the_end_of_a_canceller_which_ends_the_job() -> None:
    streams = FakeStreams()
    held = plain_job(streams)
    writer = CrashWriter(Deps(streams), held)  # type: ignore[arg-type]
    streams.put(SUBJECT, encode(StreamEntry(nonce="canceller", n=1, kind="end", status="cancelled")))
    writer.recorded([CRASH])
    await writer.write()
    assert [entry.kind for entry in entries(streams)] == ["end"]
    assert held.stop == "cancelled"
