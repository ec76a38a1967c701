"""Readers of durable streams: nothing missing, nothing twice, from any event on, and an error instead of a hole."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.codec import encode
from headrace.broker.durable.errors import EventUnknown, StreamIncomplete
from headrace.broker.durable.stored_jobs import EventJoin, JobReader, Stretch
from headrace.broker.messages.durable import JobResult, StreamEntry
from headrace.jetstream.errors import StreamTrimmed
from headrace.jetstream.ports import MessageBatch, StoredMessage, StreamState
from headrace.jetstream.subjects import Subjects


def entries_of(sizes: Sequence[int], *, takes: Sequence[int] = ()) -> list[StreamEntry]:
    """A stream whose entries have so many events; before those in `takes` another carrier takes it."""
    found: list[StreamEntry] = []
    nonce, n, events = "c0", 0, 0
    for i, size in enumerate(sizes):
        if i in takes or not i:
            nonce, n = f"c{i}", 1
            found.append(StreamEntry(nonce=nonce, n=1, kind="take"))
        n += 1
        kind = "end" if i == len(sizes) - 1 else "rows"
        own = [b"%d" % (events + j) for j in range(size)]
        found.append(StreamEntry(nonce=nonce, n=n, kind=kind, first_event=events, events=own))  # type: ignore[arg-type]
        events += size
    return found


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.sets(st.integers(0, 11)), st.data())
def test_from_any_event_on_every_later_one_comes_once_and_in_order(
    sizes: list[int], takes: set[int], data: st.DataObject
) -> None:
    wanted = data.draw(st.integers(0, sum(sizes)))
    join = EventJoin(wanted)
    seen: list[bytes] = []
    ended = 0
    for seq, entry in enumerate(entries_of(sizes, takes=sorted(takes)), 5):
        for _ in range(2):  # an entry that is read again changes nothing
            stretch = join.take(seq, entry)
            if stretch is not None:
                assert not stretch.events or stretch.first == int(stretch.events[0])
                seen += stretch.events
                ended += stretch.end is not None
    assert seen == [b"%d" % i for i in range(wanted, sum(sizes))]
    assert ended == 1


@given(st.lists(st.integers(1, 4), min_size=2, max_size=8), st.data())
def test_an_entry_that_is_missing_is_an_error_and_no_hole(sizes: list[int], data: st.DataObject) -> None:
    entries = list(enumerate(entries_of(sizes), 1))
    del entries[data.draw(st.integers(0, len(entries) - 2))]
    with pytest.raises(StreamIncomplete):
        taken(entries)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 60))
def test_an_event_behind_the_end_is_an_error_and_not_an_empty_rest(sizes: list[int], beyond: int) -> None:
    join = EventJoin(sum(sizes) + beyond)
    *others, end = entries_of(sizes)
    for seq, entry in enumerate(others, 1):
        assert join.take(seq, entry) is None
    with pytest.raises(EventUnknown, match=f"no event {sum(sizes) + beyond - 1}.* with {sum(sizes)} events"):
        join.take(99, end)


def test_events_that_do_not_join_are_an_error() -> None:
    join = EventJoin()
    join.take(1, StreamEntry(nonce="a", n=1, kind="rows", events=[b"0"]))
    with pytest.raises(StreamIncomplete, match="event 5, after 1"):
        join.take(2, StreamEntry(nonce="b", n=1, kind="rows", first_event=5, events=[b"5"]))


def taken(entries: Sequence[tuple[int, StreamEntry]]) -> None:
    join = EventJoin()
    for seq, entry in entries:
        join.take(seq, entry)


class FakeFollow:
    def __init__(self, messages: list[StoredMessage | Exception], more: asyncio.Event, start_seq: int) -> None:
        self._messages = messages
        self._more = more
        self._start = start_seq
        self.position = 0
        self.closed = False

    async def next(self) -> MessageBatch:
        while not self._messages:
            self._more.clear()
            await self._more.wait()
        first = self._messages[0]
        if isinstance(first, Exception):
            del self._messages[0]
            raise first
        del self._messages[0]
        return MessageBatch([first] if first.seq >= self._start else [], first.seq, 0)

    async def close(self) -> None:
        self.closed = True


class FakeStream:
    """Each follow gets the next script of messages."""

    def __init__(self, *scripts: list[StoredMessage | Exception], first_seq: int = 1) -> None:
        self.scripts = list(scripts)
        self.first_seq = first_seq
        self.follows: list[FakeFollow] = []
        self.more = asyncio.Event()

    async def stream_state(self, stream: str, *, subject: str = "") -> StreamState:
        return StreamState(self.first_seq, 99, 1, "then")

    def follow(self, stream: str, subject: str, *, start_seq: int, batch: int = 128) -> FakeFollow:
        assert (stream, subject) in {("HR_RSP", "hr.rsp._.j"), ("HR_RESULT", "hr.result._.j")}
        self.follows.append(FakeFollow(self.scripts.pop(0), self.more, start_seq))
        return self.follows[-1]


def stored(entries: Sequence[StreamEntry]) -> list[StoredMessage | Exception]:
    return [StoredMessage("hr.rsp._.j", seq, encode(entry)) for seq, entry in enumerate(entries, 1)]


async def read(stream: FakeStream, first: int = 0) -> list[Stretch]:
    follow = JobReader(stream, Subjects("hr")).events("_", "j", first=first)  # type: ignore[arg-type]
    found = [await follow.next()]
    while found[-1].end is None:
        found.append(await follow.next())
    await follow.close()
    return found


async def test_a_stream_is_read_to_its_end_and_its_reader_is_closed() -> None:
    stream = FakeStream(stored(entries_of([2, 1, 1])))
    found = await read(stream, first=1)
    assert [event for stretch in found for event in stretch.events] == [b"1", b"2", b"3"]
    assert found[-1].end is not None
    assert stream.follows[0].closed


async def test_a_reader_whose_position_expired_begins_again_and_repeats_nothing() -> None:
    messages = stored(entries_of([2, 1, 1]))
    stream = FakeStream([*messages[:2], StreamTrimmed("x", wanted=1, first_seq=2, last_seq=9)], messages)
    found = await read(stream)
    assert [event for stretch in found for event in stretch.events] == [b"0", b"1", b"2", b"3"]
    assert [follow.closed for follow in stream.follows] == [True, True]


async def test_a_result_is_waited_for() -> None:
    stream = FakeStream([])
    waiting = asyncio.create_task(JobReader(stream, Subjects("hr")).result("_", "j"))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.follows[0]._messages.append(StoredMessage("s", 1, b'{"id":"j","status":"done"}'))
    stream.more.set()
    assert (await waiting) == JobResult(id="j", status="done")
