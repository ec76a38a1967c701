"""Work beside the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headrace.workers.blocking import run_in_thread


async def test_the_loop_goes_on_and_the_result_comes() -> None:
    may_end = threading.Event()

    def work() -> int:
        may_end.wait(10)
        return 7

    waiting = asyncio.create_task(run_in_thread(work, name="test"))
    await asyncio.sleep(0)
    may_end.set()
    assert await waiting == 7


async def test_what_the_work_raises_is_raised_here() -> None:
    def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await run_in_thread(work, name="test")


async def test_who_stops_waiting_need_not_wait_for_the_end() -> None:
    may_end, ended = threading.Event(), threading.Event()

    def work() -> None:
        may_end.wait(10)
        ended.set()

    waiting = asyncio.create_task(run_in_thread(work, name="test"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not ended.is_set()
    may_end.set()
    assert await asyncio.to_thread(ended.wait, 10)
