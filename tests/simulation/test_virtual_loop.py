"""The virtual event loop: asyncio as it is, on a clock that costs nothing."""

import asyncio
import os
import random
import secrets
import time
import uuid

import pytest

from tests.simulation.virtual.faults import ProcessFailed
from tests.simulation.virtual.loop import EPOCH_S, Livelock
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.network import CALM
from tests.simulation.virtual.world import World


def run(main, *, seed=1, until_s=1000.0):
    with World(seed, CALM) as world:
        world.process("P", main)
        world.run(until_s)
        return world


def test_a_day_of_sleep_takes_no_time_and_each_process_has_its_own_running_loop():
    seen = []

    async def main(machine: Machine):
        assert asyncio.get_running_loop() is machine.loop
        await asyncio.sleep(86_400)
        seen.append(machine.loop.time())

    run(main, until_s=100_000)
    assert seen == [86_400]


def test_task_groups_timeouts_queues_events_and_cancellation_behave_as_in_asyncio():
    log = []

    async def main(_machine: Machine):
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)
        go = asyncio.Event()

        async def producer():
            await go.wait()
            for i in range(3):
                await queue.put(i)

        async def consumer():
            while len(log) < 3:
                log.append(await queue.get())

        async with asyncio.TaskGroup() as group:
            group.create_task(producer())
            group.create_task(consumer())
            asyncio.get_running_loop().call_later(2.0, go.set)
        log.append(asyncio.get_running_loop().time())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await asyncio.Event().wait()
        with pytest.raises(ExceptionGroup):
            await fails_in_a_group()
        log.append(asyncio.get_running_loop().time())
        done, pending = await asyncio.wait([asyncio.ensure_future(asyncio.sleep(i, i)) for i in (1, 2, 3)], timeout=2.5)
        log.append((len(done), len(pending)))
        await asyncio.gather(*pending)
        log.append(await asyncio.to_thread(lambda: "threadless"))

    async def fails_in_a_group():
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(100))
            group.create_task(asyncio.to_thread(int, "no number"))

    run(main)
    assert log == [0, 1, 2, 2.0, 2.5, (2, 1), "threadless"]


def test_async_generators_are_finalised_on_their_loop():
    log = []

    async def numbers():
        try:
            yield 1
        finally:
            await asyncio.sleep(1)
            log.append("closed")

    async def main(_machine: Machine):
        async for _ in numbers():
            break
        await asyncio.sleep(5)

    run(main)
    assert log == ["closed"]


def test_clocks_and_entropy_follow_the_seed_and_are_restored():
    async def main(machine: Machine):
        await asyncio.sleep(1.5)
        drawn.append((random.random(), secrets.token_hex(4), uuid.uuid4().hex, os.urandom(3), time.time(), time.monotonic()))

    drawn = []
    run(main, seed=5)
    run(main, seed=5)
    run(main, seed=6)
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][4:] == (EPOCH_S + 1.5, 1.5)
    assert abs(time.time() - EPOCH_S) > 1000


def test_processes_interleave_by_the_seed():
    def order(seed):
        log = []

        async def main(machine: Machine):
            for _ in range(5):
                log.append(machine.name)
                await asyncio.sleep(0)

        with World(seed, CALM) as world:
            for name in "ABC":
                world.process(name, main)
            world.run(1.0)
        return "".join(log)

    assert order(1) == order(1)
    assert len({order(seed) for seed in range(10)}) > 5


def test_an_exception_of_a_process_or_of_a_forgotten_task_ends_the_run():
    async def main(_machine: Machine):
        raise ValueError("boom")

    async def forgetful(_machine: Machine):
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    with pytest.raises(ProcessFailed, match="boom"):
        run(main)
    with pytest.raises(ProcessFailed, match="division"):
        run(forgetful)


def test_a_process_that_spins_is_found(monkeypatch):
    monkeypatch.setattr("tests.simulation.virtual.loop.BUSY_LIMIT", 1000)

    async def main(_machine: Machine):
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Livelock, match="P"):
        run(main)
