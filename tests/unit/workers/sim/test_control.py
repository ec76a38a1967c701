"""A simulated engine that sleeps, and engines that hand over in real time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from headrace.workers.engine import DisaggStyle, EngineConfig, Handover, Role
from headrace.workers.errors import EngineOverloaded, EngineStartFailed, RequestInvalid, UnsupportedByEngine
from headrace.workers.sim.engine import SimEngine
from headrace.workers.sim.fabric import LocalFabric
from headrace.workers.sim.tokens import expected_ids
from tests.unit.workers.sim.test_engine import Bench, sequence, started

PROMPT = list(range(40))


async def warmed(bench: Bench) -> None:
    await bench.engine.submit(sequence("warm", PROMPT, max_tokens=1))
    await bench.until(lambda: bench.finished("warm"))


async def cached(bench: Bench) -> int | None:
    await bench.engine.submit(sequence("again", PROMPT, max_tokens=1))
    await bench.until(lambda: bench.finished("again"))
    return next(output.cached_tokens for step in bench.steps for output in step if output.id == "again")


SMALL = {"block_size": 4, "context_length": 128}


@pytest.mark.parametrize(("level", "frees", "left"), [(1, False, 36), (1, True, 0), (2, False, 0), (2, True, 0)])
async def test_what_is_cached_after_waking_depends_on_level_and_memory(level, frees, left):
    async with started(**SMALL, sleep_frees_memory=frees) as bench:
        await warmed(bench)
        assert (await bench.engine.control("sleep", {"level": level}))["memory_freed"] is frees
        assert bench.engine.load().blocks_total == (0 if frees else 4096)
        with pytest.raises(EngineOverloaded, match=f"level {level}"):
            await bench.engine.submit(sequence("a", [1]))
        await bench.engine.healthy()
        assert await bench.engine.control("wake", {}) == {"level": 0}
        assert bench.engine.load().blocks_total == 4096
        assert await cached(bench) == left


async def test_the_tiers_below_survive_level_1_and_say_so():
    async with started(**SMALL, blocks=32, host_blocks=64) as bench:
        await warmed(bench)
        for n in range(2):
            await bench.engine.submit(sequence(f"big{n}", [n] * 120, max_tokens=1))
            await bench.until(lambda n=n: bench.finished(f"big{n}"))
        reader = bench.engine.kv_events()
        view = {(event.tier, value) for event in await anext(reader) for value in event.hashes}
        await bench.engine.control("sleep", {"level": 1})
        async with asyncio.timeout(5):
            (removed,) = await anext(reader)
        assert removed.kind == "removed"
        assert set(removed.hashes) == {value for tier, value in view if tier == "device"}
        await bench.engine.control("wake", {})
        assert await cached(bench) == 36


async def test_sequences_inside_are_aborted_or_waited_for():
    async with started(timing="cpu-small", speedup=20) as bench:
        await bench.engine.submit(sequence("a", [1], max_tokens=5000))
        await bench.until(lambda: len(bench.ids("a")) > 2)
        assert (await bench.engine.control("sleep", {}))["aborted"] == 1
        assert bench.steps[-1][-1].finish == "abort"
        count = len(bench.steps)
        await asyncio.sleep(0.01)
        assert len(bench.steps) == count
        await bench.engine.control("wake", {})
        await bench.engine.submit(sequence("b", [2], max_tokens=20))
        asleep = await bench.engine.control("sleep", {"mode": "wait"})
        assert asleep["aborted"] == 0
        assert bench.ids("b") == expected_ids([2], 20)
        assert bench.engine.load().blocks_used == 0


async def test_waiting_for_sequences_waits_for_their_last_output():
    async with started(timing="cpu-small", speedup=2) as bench:
        await bench.engine.submit(sequence("a", [1], max_tokens=1))
        await asyncio.sleep(0.001)  # inside the engine it is over, and the step still runs
        await bench.engine.control("sleep", {"mode": "wait"})
        assert bench.finished("a")


async def test_an_engine_sleeps_as_deep_as_it_was_told_until_it_wakes():
    async with started() as bench:
        levels = [(await bench.engine.control("sleep", {"level": level}))["level"] for level in (2, 1)]
        assert levels == [2, 2]


async def test_waiting_for_sequences_that_do_not_end_ends():
    async with started(faults={"stuck_at_token": 0}) as bench:
        await bench.engine.submit(sequence("a", [1]))
        asleep = await bench.engine.control("sleep", {"mode": "wait", "timeout_s": 0.02})
        assert asleep["aborted"] == 1


async def test_a_wake_ends_the_waiting_for_sleep():
    async with started(faults={"stuck_at_token": 0}) as bench:
        await bench.engine.submit(sequence("a", [1]))
        async with asyncio.TaskGroup() as group:
            going = group.create_task(bench.engine.control("sleep", {"mode": "wait"}))
            await asyncio.sleep(0.01)
            await bench.engine.control("wake", {})
        assert going.result()["level"] == 0
        await bench.engine.submit(sequence("b", [1]))
        with pytest.raises(RequestInvalid, match="level"):
            await bench.engine.control("sleep", {"level": 3})


# -- two engines ---------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def pair(**args) -> AsyncIterator[tuple[Bench, Bench]]:
    fabric = LocalFabric()
    benches = []
    async with contextlib.AsyncExitStack() as stack:
        for role in (Role.PREFILL, Role.DECODE):
            bench = Bench(SimEngine(kill=lambda: None, fabric=fabric))
            options = {**SMALL, "engine_id": role.value, "fabric": "local", **args}
            config = EngineConfig(model="sim", served_name="sim", role=role, args=options)
            info = await bench.engine.start(config, bench.sink)
            assert info.address == role.value
            stack.push_async_callback(bench.engine.stop, 1.0)
            benches.append(bench)
        yield benches[0], benches[1]


async def prefill(bench: Bench, name: str = "a") -> dict:
    await bench.engine.submit(sequence(name, PROMPT, handover=Handover(kind="prefill")))
    await bench.until(lambda: bench.finished(name))
    (output,) = [output for step in bench.steps for output in step if output.id == name]
    assert output.handover is not None
    return dict(output.handover)


async def test_a_lease_ends_in_an_idle_engine_too():
    async with pair(lease_s=0.02) as (p, _):
        await prefill(p)
        async with asyncio.timeout(5):
            while p.engine.load().blocks_used:
                await asyncio.sleep(0.005)
        assert (await p.engine.control("stats", {}))["handovers_expired"] == 1


async def test_an_engine_that_died_or_sleeps_is_not_read_from():
    async with pair(transfer_mode="pull", handshake_timeout_s=0.02) as (p, d):
        params = await prefill(p)
        await p.engine.control("sleep", {})
        await d.engine.submit(sequence("b", PROMPT, handover=Handover(kind="decode", params=params)))
        await d.until(lambda: d.finished("b"))
        await p.engine.stop(1.0)
        await d.engine.submit(sequence("c", PROMPT, handover=Handover(kind="decode", params=params)))
        await d.until(lambda: d.finished("c"))
        faults = [output.fault for step in d.steps for output in step]
        assert [fault.retriable for fault in faults if fault] == [True, True]


async def test_they_meet_in_a_room():
    async with pair(disagg="rendezvous") as (p, d):
        assert p.engine.capabilities.disagg is DisaggStyle.RENDEZVOUS
        await d.engine.submit(sequence("a", PROMPT, handover=Handover(kind="decode", room=3, peer="prefill")))
        await p.engine.submit(sequence("a", PROMPT, handover=Handover(kind="prefill", room=3)))
        await d.until(lambda: d.finished("a"))
        await p.until(lambda: p.finished("a"))
        assert d.ids("a") == expected_ids(PROMPT, 10)


async def test_a_hand_over_can_be_released_through_the_engine():
    async with pair() as (p, d):
        params = await prefill(p)
        assert await d.engine.control("release_handover", {"params": params}) == {"released": True}
        assert p.engine.load().blocks_used == 0
        assert await p.engine.control("release_handover", {"request": "a"}) == {"released": False}
        with pytest.raises(RequestInvalid):
            await p.engine.control("release_handover", {"request": 3})
    async with started() as bench:
        with pytest.raises(UnsupportedByEngine):
            await bench.engine.control("release_handover", {"request": "a"})


async def test_two_engines_with_one_id_cannot_be():
    async with pair(), pair():
        pass  # two fabrics
    fabric = LocalFabric()
    engines = [SimEngine(fabric=fabric), SimEngine(fabric=fabric)]
    config = EngineConfig(model="sim", served_name="sim", role=Role.PREFILL, args={"engine_id": "x", "fabric": "local"})
    await engines[0].start(config, lambda outputs: None)
    with pytest.raises(EngineStartFailed, match="'x'"):
        await engines[1].start(config, lambda outputs: None)
    await engines[0].stop(1.0)
    await engines[1].start(config, lambda outputs: None)
    await engines[1].stop(1.0)
