"""A command that waits says for what and since when; on a terminal in one line that goes away."""

from __future__ import annotations

import asyncio
import io

import pytest

from headrace.commands.waiting import told_while
from headrace.jetstream.errors import RequestTimeout


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
