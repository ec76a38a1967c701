"""A command that takes long says how far it is: with a bar on a terminal, with few lines elsewhere."""

from __future__ import annotations

import asyncio
import io

from headrace.commands.progress import Progress, told_while


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


async def test_on_a_terminal_the_line_changes_and_goes_away() -> None:
    stream = Terminal()
    await told_while(until_said(stream, 2), "worker w wakes", stream=stream, every_s=0.01)
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().startswith("\r\x1b[Kworker w wakes … 0 s\r\x1b[K")
    assert stream.getvalue().endswith("\r\x1b[K")
