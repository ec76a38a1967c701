"""An entry is appended once, or its writer learns that it has lost."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.codec import decode, encode
from headrace.broker.durable import stream_writer
from headrace.broker.durable.errors import CarrierLost, StreamIncomplete
from headrace.broker.durable.stream_writer import DurableStreamWriter, LastEntry, after_refusal, fold, read_stream
from headrace.broker.messages.durable import StreamEntry
from headrace.jetstream.subjects import Subjects
from tests.unit.broker.durable.fakes import FakeStreams

SUBJECT = "hr.rsp.t.j"
FAULTS = st.lists(st.sampled_from(["", "", "full", "lose", "loseack", "stale", "unread"]), max_size=12)


def writer(streams: FakeStreams, nonce: str = "me") -> DurableStreamWriter:
    return DurableStreamWriter(streams, Subjects("hr"), "t", "j", nonce=nonce)  # type: ignore[arg-type]


def stored(streams: FakeStreams) -> list[StreamEntry]:
    return [decode(StreamEntry, message.data) for message in streams.of(SUBJECT)]


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_writer, "RETRY_S", 0.0)


@pytest.mark.parametrize(
    ("last", "outcome"),
    [
        (None, "again"),
        (LastEntry(5, "other", 1), "again"),
        (LastEntry(4, "other", 1), "again"),
        (LastEntry(6, "other", 1), "lost"),
        (LastEntry(6, "me", 2), "landed"),
        (LastEntry(6, "me", 1), "lost"),
    ],
)
def test_what_was_refused_is_judged_by_the_last_entry(last: LastEntry | None, outcome: str) -> None:
    assert after_refusal(last, known_seq=5, nonce="me", n=2) == outcome


@given(FAULTS)
def test_entries_land_in_order_and_once_whatever_is_lost(faults: list[str]) -> None:
    streams = FakeStreams(faults)

    async def write() -> None:
        own = writer(streams)
        for carrier in ("a", "b", "c"):
            await own.append("take", carrier=carrier)

    asyncio.run(write())
    assert [(entry.n, entry.carrier) for entry in stored(streams)] == [(1, "a"), (2, "b"), (3, "c")]
    fold((message.seq, decode(StreamEntry, message.data)) for message in streams.of(SUBJECT))


async def test_a_writer_goes_on_when_its_entries_are_gone_with_the_files_of_the_stream() -> None:
    streams = FakeStreams()
    own = writer(streams)
    await own.append("take", carrier="a")
    streams.messages.clear()
    async with asyncio.timeout(5):
        await own.append("ok")
    assert [(entry.n, entry.kind) for entry in stored(streams)] == [(2, "ok")]


@given(FAULTS, st.integers(0, 6))
def test_a_writer_behind_another_one_stops(faults: list[str], step: int) -> None:
    streams = FakeStreams(faults)
    foreign = encode(StreamEntry(nonce="other", n=1, kind="take", carrier="x"))
    calls = 0
    real = streams.publish

    async def publish(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == step + 1:
            streams.put(SUBJECT, foreign)
        return await real(*args, **options)

    streams.publish = publish  # type: ignore[method-assign]

    async def write() -> bool:
        own = writer(streams)
        try:
            for _ in range(8):
                await own.append("ok")
        except CarrierLost:
            return True
        return False

    assert asyncio.run(write())
    entries = stored(streams)
    assert entries[-1].nonce == "other"
    assert [entry.n for entry in entries[:-1]] == list(range(1, len(entries)))


def test_an_unknown_outcome_is_repeated_with_the_same_bytes() -> None:
    streams = FakeStreams(["lose", "unread", "lose"])
    asyncio.run(writer(streams).append("take", carrier="c"))
    assert len(streams.published) == 3
    assert len(set(streams.published)) == 1


def test_what_was_left_unsettled_is_settled_before_anything_else_is_written() -> None:
    streams = FakeStreams(["lose", "unread"])

    async def write() -> None:
        own = writer(streams)
        waiting = asyncio.ensure_future(own.append("take", carrier="first"))
        for _ in range(2):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await own.append("end", status="done")

    asyncio.run(write())
    assert [entry.kind for entry in stored(streams)] == ["take", "end"]


async def test_an_entry_that_cannot_be_read_is_another_writers_and_not_waited_for() -> None:
    streams = FakeStreams()
    streams.put(SUBJECT, b"\xc1")
    with pytest.raises(CarrierLost):
        await writer(streams).append("take", carrier="c")
    with pytest.raises(StreamIncomplete, match="cannot be read"):
        await read_stream(streams, Subjects("hr"), "t", "j")  # type: ignore[arg-type]
