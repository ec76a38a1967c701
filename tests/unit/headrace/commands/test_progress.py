"""A command that takes long says how far it is: with a bar on a terminal, with few lines elsewhere."""

from __future__ import annotations

import asyncio
import io

import pytest

from headrace.commands.progress import Progress, told_while
from headrace.jetstream.errors import RequestTimeout


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_there_is_a_line_from_time_to_time_and_none_at_the_end() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress(1000, "lines", stream=stream, every_s=10.0, clock=clock) as progress:
        for _ in range(1000):
            clock.now += 0.03125
            progress.update(failed=3)
    assert stream.getvalue().splitlines() == [
        "320 of 1,000 lines (32%) after 10 s, failed 3",
        "640 of 1,000 lines (64%) after 20 s, failed 3",
        "960 of 1,000 lines (96%) after 30 s, failed 3",
    ]


def test_what_is_over_soon_says_nothing() -> None:
    stream = io.StringIO()
    with Progress(2, "lines", stream=stream, clock=Clock()) as progress:
        progress.update()
        progress.update()
    assert stream.getvalue() == ""


def test_on_a_terminal_there_is_a_bar_that_goes_away() -> None:
    stream = Terminal()
    with Progress(4, "requests", stream=stream) as progress:
        progress.update(4, failed=1)
    text = stream.getvalue()
    assert "/4" in text
    assert "\n" not in text.rstrip("\n ")
    assert text.rpartition("\r")[2].strip() == ""


async def until_said(stream: io.StringIO, lines: int) -> str:
    async with asyncio.timeout(30):
        while stream.getvalue().count(" … ") < lines:
            await asyncio.sleep(0.001)
    return "done"


async def test_without_a_terminal_there_is_a_line_each_time_with_what_was_found() -> None:
    stream = io.StringIO()
    left = iter((7, 3))

    async def look() -> str:
        return f"{next(left)} requests left"

    assert await told_while(until_said(stream, 2), "worker w drains", look, stream=stream, every_s=0.01) == "done"
    assert stream.getvalue().splitlines()[:2] == [
        "worker w drains … 0 s, 7 requests left",
        "worker w drains … 0 s, 3 requests left",
    ]


async def test_on_a_terminal_the_line_changes_and_goes_away() -> None:
    stream = Terminal()
    await told_while(until_said(stream, 2), "worker w wakes", stream=stream, every_s=0.01)
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().startswith("\r\x1b[Kworker w wakes … 0 s\r\x1b[K")
    assert stream.getvalue().endswith("\r\x1b[K")


async def test_what_is_soon_over_says_nothing() -> None:
    stream = io.StringIO()
    assert await told_while(asyncio.sleep(0, "done"), "it", stream=stream) == "done"
    assert stream.getvalue() == ""


async def test_a_look_that_fails_costs_only_what_it_would_have_found() -> None:
    stream = io.StringIO()

    async def look() -> str:
        raise RequestTimeout("late")

    await told_while(until_said(stream, 2), "it", look, stream=stream, every_s=0.01)
    assert stream.getvalue().splitlines()[0] == "it … 0 s"


async def test_the_error_of_the_work_is_its_own() -> None:
    async def fail() -> None:
        raise RequestTimeout("late")

    with pytest.raises(RequestTimeout, match="late"):
        await told_while(fail(), "it", stream=io.StringIO())
