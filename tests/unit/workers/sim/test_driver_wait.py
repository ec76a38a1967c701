"""How the simulator's driver waits."""

from __future__ import annotations

import asyncio

from headrace.workers.sim.driver_wait import pass_time, until_work


class FakeExchange:
    """To be looked at after `pause_s`, or never; the look number `finds` finds something."""

    def __init__(self, pause_s: float | None, finds: int = 0) -> None:
        self.pause_s, self.finds = pause_s, finds
        self.looks = 0

    def poll_at(self) -> float | None:
        return None if self.pause_s is None else asyncio.get_running_loop().time() + self.pause_s

    def poll(self) -> bool:
        self.looks += 1
        return self.looks == self.finds


class FakeScheduler:
    def __init__(self, exchange: FakeExchange, due_in_s: float | None = None) -> None:
        self.exchange = exchange
        self.due = None if due_in_s is None else asyncio.get_running_loop().time() + due_in_s

    def next_at(self) -> float | None:
        return self.due


async def test_other_engines_are_listened_to_while_a_step_runs():
    exchange = FakeExchange(0.001)
    loop = asyncio.get_running_loop()
    until = loop.time() + 0.05
    await pass_time(exchange, until, loop.time)  # type: ignore[arg-type]
    assert exchange.looks >= 2
    assert loop.time() >= until


async def test_a_step_without_duration_gives_way_once():
    others = []
    asyncio.get_running_loop().call_soon(others.append, 1)
    await pass_time(FakeExchange(None), 0.0, asyncio.get_running_loop().time)  # type: ignore[arg-type]
    assert others


async def test_while_blocks_move_it_looks_without_a_pause_and_others_run_in_between():
    exchange, others = FakeExchange(0.0, finds=50), 0

    async def beside() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(beside())
    await until_work(FakeScheduler(exchange), asyncio.Event())  # type: ignore[arg-type]
    task.cancel()
    assert exchange.looks == 50
    assert others >= 49


async def test_it_waits_for_work_for_what_is_due_and_for_its_next_look():
    loop, work = asyncio.get_running_loop(), asyncio.Event()
    async with asyncio.timeout(5):
        loop.call_later(0.01, work.set)
        await until_work(FakeScheduler(FakeExchange(None)), work)  # type: ignore[arg-type]
        work.clear()
        await until_work(FakeScheduler(FakeExchange(None), due_in_s=0.01), work)  # type: ignore[arg-type]
        work.clear()
        await until_work(FakeScheduler(FakeExchange(0.01)), work)  # type: ignore[arg-type]
