"""Rows that reach their reader without waking it: all of them, in order, and not in more pieces than is good."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.errors import JobCancelled
from headrace.broker.ingress.stream import MOST, PER_READER_S, JobStream, RowDispatcher
from headrace.broker.messages.frames import Finish, JobFault, Row
from tests.support.ingress_parts import StreamReports

END = Finish(reason="stop")
MANY = 1_000_000  # readers, among whom everybody waits as long as is allowed


class Clock:
    """An event loop of which the test is the time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, call: Callable[[], None]) -> None:
        self.calls.append((self.now, call))

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.calls.append((self.now + delay_s, call))

    def turn(self, *, after_s: float = 0.0) -> None:
        """What is due by then, once; what that asks for comes with the next turn."""
        self.now += after_s
        due = [call for when, call in self.calls if when <= self.now]
        self.calls = [(when, call) for when, call in self.calls if when > self.now]
        for call in due:
            call()


class Reader:
    def __init__(self, dispatcher: RowDispatcher) -> None:
        self.dispatcher = dispatcher
        self.delivered_s = 0.0
        self.waiting = 0
        self.got: list[int] = []

    def take(self, *, last: bool = False) -> None:
        self.waiting += 1
        if self.waiting == 1 or last:
            self.dispatcher.add(self, self.dispatcher.loop.time(), last=last)

    def deliver(self) -> None:
        if self.waiting:
            self.got.append(self.waiting)
            self.waiting = 0


def world(gather_s: float) -> tuple[Clock, RowDispatcher, Reader]:
    clock = Clock()
    dispatcher = RowDispatcher(clock, gather_s=gather_s)  # type: ignore[arg-type]
    dispatcher.readers = MANY
    return clock, dispatcher, Reader(dispatcher)


def test_a_slow_stream_never_waits() -> None:
    clock, _, reader = world(0.002)
    for _ in range(3):
        reader.take()
        clock.turn()
        assert reader.waiting == 0
        clock.turn(after_s=0.003)
    assert reader.got == [1, 1, 1]


def test_a_fast_stream_gets_its_rows_in_pieces_and_waits_for_none_longer_than_it_says() -> None:
    clock, _, reader = world(0.002)
    reader.take()
    clock.turn()
    for _ in range(4):
        reader.take()
        clock.turn()
    assert (reader.got, reader.waiting) == ([1], 4)
    clock.turn(after_s=0.002)
    clock.turn()
    assert reader.got == [1, 4]


def test_the_wait_grows_with_the_readers_up_to_its_limit() -> None:
    clock, dispatcher, reader = world(0.008)
    for readers, wait_s in ((1, PER_READER_S), (40, 0.002), (160, 0.008), (1000, 0.008)):
        dispatcher.readers = readers
        reader.delivered_s, reader.got = clock.now, []
        reader.take()
        clock.turn(after_s=0.9 * wait_s)
        clock.turn()
        assert reader.got == []
        clock.turn(after_s=0.11 * wait_s)
        clock.turn()
        assert reader.got == [1]


def test_the_end_does_not_wait() -> None:
    clock, _, reader = world(0.002)
    reader.take()
    clock.turn()
    reader.take()
    reader.take(last=True)
    clock.turn()
    assert reader.got == [1, 2]
    clock.turn(after_s=1)
    clock.turn()
    assert reader.got == [1, 2]


def test_without_gathering_everything_is_passed_on_in_the_next_turn() -> None:
    clock, _, reader = world(0.0)
    for _ in range(3):
        reader.take()
        reader.take()
        clock.turn()
    assert reader.got == [2, 2, 2]


def test_a_crowd_is_served_over_several_turns() -> None:
    clock, dispatcher, _ = world(0.0)
    crowd = [Reader(dispatcher) for _ in range(2 * MOST + 1)]
    for reader in crowd:
        reader.take()
    served = []
    for _ in range(3):
        clock.turn()
        served.append(sum(len(reader.got) for reader in crowd))
    assert served == [MOST, 2 * MOST, 2 * MOST + 1]


# -- with a stream ---------------------------------------------------------------------------------------------------------


def row(number: int, fin: Finish | None = None) -> Row:
    return Row("r", 1, 1, 0, number, [number], [str(number)], None, fin)


def stream(*, gather_s: float = 0.0, limit: int = 1000) -> JobStream:
    dispatcher = RowDispatcher(asyncio.get_running_loop(), gather_s=gather_s)
    dispatcher.readers = MANY
    return JobStream("r", limit=limit, owner=StreamReports(), dispatcher=dispatcher)


def numbers(rows: list[Row]) -> list[int]:
    return [row.ids[0] for row in rows]


@given(data=st.data())
def test_every_row_comes_once_and_in_order_whoever_takes_it(data: Any) -> None:
    total = data.draw(st.integers(1, 30))
    pauses = data.draw(st.lists(st.booleans(), min_size=total, max_size=total))
    stops = data.draw(st.sets(st.integers(0, total)))
    gather_s = data.draw(st.sampled_from([0.0, 0.0005]))

    async def run() -> list[int]:
        reading = stream(gather_s=gather_s)
        got: list[int] = []

        def sink(rows: list[Row]) -> bool:
            got.extend(numbers(rows))
            return not stops & set(numbers(rows))

        async def read() -> None:
            while rows := await reading.rows():
                got.extend(numbers(rows))
                await reading.deliver_to(sink)

        async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            for number, pause in enumerate(pauses):
                assert reading.take(row(number, END if number == total - 1 else None), asyncio.get_running_loop().time())
                if pause:
                    await asyncio.sleep(0)
            reading.end(None)
        return got

    assert asyncio.run(run()) == list(range(total))


async def test_rows_before_a_fault_are_passed_on_and_the_fault_is_left_to_rows() -> None:
    reading, got = stream(gather_s=10.0), []
    passing = asyncio.create_task(reading.deliver_to(lambda rows: got.extend(numbers(rows)) or True))
    await asyncio.sleep(0)
    reading.take(row(0), asyncio.get_running_loop().time())
    reading.end(JobFault("cancelled", "gone"))
    async with asyncio.timeout(1):
        await passing
    assert got == [0]
    with pytest.raises(JobCancelled, match="gone"):
        await reading.rows()


async def test_a_stream_counts_as_a_reader_while_its_rows_are_passed_on() -> None:
    dispatcher = RowDispatcher(asyncio.get_running_loop(), gather_s=1.0)
    reading = JobStream("r", limit=9, owner=StreamReports(), dispatcher=dispatcher)
    counts = [dispatcher.readers]
    task = asyncio.create_task(reading.deliver_to(lambda rows: True))
    await asyncio.sleep(0)
    counts.append(dispatcher.readers)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [*counts, dispatcher.readers] == [0, 1, 0]


async def test_what_the_sink_raises_its_reader_gets() -> None:
    def sink(rows: list[Row]) -> bool:
        raise RuntimeError("cannot write")

    reading = stream()
    passing = asyncio.create_task(reading.deliver_to(sink))
    await asyncio.sleep(0)
    reading.take(row(0), asyncio.get_running_loop().time())
    with pytest.raises(RuntimeError, match="cannot write"):
        await passing


async def test_a_reader_that_leaves_loses_no_row_and_its_sink_is_called_no_more() -> None:
    called = []
    reading = stream()
    passing = asyncio.create_task(reading.deliver_to(lambda rows: called.append(rows) or True))
    await asyncio.sleep(0)
    reading.take(row(0), asyncio.get_running_loop().time())
    passing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await passing
    reading.take(row(1), asyncio.get_running_loop().time())
    await asyncio.sleep(0)
    assert called == []
    assert numbers(await reading.rows()) == [0, 1]


@pytest.mark.parametrize("breaks", [False, True])
async def test_a_sink_that_sends_its_own_reader_away_harms_no_other_stream(*, breaks: bool) -> None:
    """As when it finds, while it writes, that the client is gone."""
    dispatcher = RowDispatcher(asyncio.get_running_loop())
    first, second = (JobStream("r", limit=9, owner=StreamReports(), dispatcher=dispatcher) for _ in range(2))
    got: list[int] = []

    def sends_away(rows: list[Row]) -> bool:
        leaving.cancel()
        if breaks:
            raise RuntimeError("broken pipe")
        return False

    leaving = asyncio.create_task(first.deliver_to(sends_away))
    staying = asyncio.create_task(second.deliver_to(lambda rows: got.extend(numbers(rows)) or False))
    await asyncio.sleep(0)
    first.take(row(0), asyncio.get_running_loop().time())
    second.take(row(1), asyncio.get_running_loop().time())
    async with asyncio.timeout(1):
        await staying
        with pytest.raises(asyncio.CancelledError):
            await leaving
    assert got == [1]


async def test_a_stream_that_was_full_says_so_when_its_sink_has_taken_the_rows() -> None:
    events = StreamReports()
    dispatcher = RowDispatcher(asyncio.get_running_loop())
    reading = JobStream("r", limit=2, owner=events, dispatcher=dispatcher)
    task = asyncio.create_task(reading.deliver_to(lambda rows: True))
    await asyncio.sleep(0)
    assert [reading.take(row(n), asyncio.get_running_loop().time()) for n in range(3)] == [True, True, False]
    await asyncio.sleep(0)
    assert events.drained == ["r"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
