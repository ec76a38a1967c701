"""Simulated engines in processes of their own hand over real bytes through NIXL."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.util import find_spec
from typing import Any

import pytest

from headrace.workers.engine import Fault, Handover, Output, Role
from headrace.workers.errors import EngineStartFailed
from headrace.workers.nixl.descriptors import NixlUnavailable
from headrace.workers.sim.engine import SimEngine
from headrace.workers.sim.nixl_fabric import NixlFabric
from headrace.workers.sim.tokens import expected_ids
from tests.support.sim_peer import Peer, Seen, config, sequence

pytestmark = [pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed"), pytest.mark.slow]

PROMPT = list(range(10, 28))  # four whole blocks of four and a half
SMALL: dict[str, Any] = {"block_size": 4, "blocks": 2048, "context_length": 512, "allow_request_faults": True}
MODES: dict[str, dict[str, Any]] = {
    "pull": {"transfer_mode": "pull"},
    "push": {"transfer_mode": "push"},
    "room": {"disagg": "rendezvous"},
}
STALL = {"stall_transfer": True}


class Pair:
    """A prefill and a decode engine that know each other."""

    def __init__(self, p: Peer, d: Peer, address: str, *, rooms: bool) -> None:
        self.p, self.d = p, d
        self._address = address
        self._rooms = rooms
        self._room = 0

    async def prefill(self, name: str, prompt: list[int], **options: Any) -> Handover:
        """Have a prompt computed; what to give the decode side. In the style rendezvous it is under way."""
        if self._rooms:
            self._room += 1
            room = self._room
            await self.p.submit(sequence(name, prompt, handover=Handover(kind="prefill", room=room), **options))
            return Handover(kind="decode", room=room, peer=self._address)
        await self.p.submit(sequence(name, prompt, handover=Handover(kind="prefill"), **options))
        last = await self.p.end(name)
        assert last.handover is not None, last
        return Handover(kind="decode", params=last.handover)

    async def decode(self, name: str, prompt: list[int], handover: Handover, **options: Any) -> None:
        await self.d.submit(sequence(name, prompt, handover=handover, **options))

    async def free(self) -> None:
        """Until neither side holds a block."""
        for side in (self.p, self.d):
            if side.process.is_alive():
                await until(lambda side=side: none_used(side))


async def none_used(side: Peer) -> bool:
    return await side.used() == 0


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def pair(mode: str, **args: Any) -> AsyncIterator[Pair]:
    args = {**SMALL, **MODES[mode], **args}
    p, d = Peer.hire(), Peer.hire()
    try:
        of_p, of_d = await asyncio.gather(p.start(Role.PREFILL, **args), d.start(Role.DECODE, **args))
        assert of_p.handover == of_d.handover
        await d.call("meet", {"prefill": of_p.transfer_card})
        await p.call("meet", {"decode": of_d.transfer_card})
        yield Pair(p, d, of_p.address, rooms=mode == "room")
    finally:
        await asyncio.gather(p.leave(), d.leave())


def failed(last: Output) -> Fault:
    assert last.fault is not None, last
    assert (last.fault.code, last.fault.retriable) == ("transfer_failed", True)
    return last.fault


# -- what arrives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_many_prompts_arrive_whole_and_both_sides_are_empty_afterwards(mode):
    draw = random.Random(4)
    prompts = {f"s{n}": [draw.randrange(1, 1000) for _ in range(draw.randrange(1, 200))] for n in range(40)}
    async with pair(mode) as both:

        async def one(name: str, prompt: list[int]) -> Output:
            await both.decode(name, prompt, await both.prefill(name, prompt))
            return await both.d.end(name)

        ended = await asyncio.gather(*(one(*item) for item in prompts.items()))
        assert [last.fault for last in ended] == [None] * len(prompts)
        for name, prompt in prompts.items():
            assert both.d.ids(name) == expected_ids(prompt, 10)
            assert (both.d.outputs[name][0].extra or {})["remote_tokens"] == len(prompt) - 1
        await both.free()
        stats = await both.d.call("control", "stats", {})
        assert stats["fetched_blocks"] == sum(-(-(len(prompt) - 1) // 4) for prompt in prompts.values())
        assert (stats["failed_fetches"], stats["stale_fetches"], stats["broken_fetches"]) == (0, 0, 0)


@pytest.mark.parametrize("mode", MODES)
async def test_what_the_decode_engine_has_is_not_moved_even_if_that_is_all(mode):
    prompt = PROMPT[:17]
    async with pair(mode) as both:
        for name in ("a", "b", "c"):
            await both.decode(name, prompt, await both.prefill(name, prompt))
            await both.d.end(name)
            assert both.d.ids(name) == expected_ids(prompt, 10)
        await both.free()
        assert (await both.d.call("control", "stats", {}))["fetched_blocks"] == 4


async def test_after_the_lease_a_reader_gets_what_lies_there_now():
    async with pair("pull", lease_s=0.2, blocks=64, context_length=256) as both:
        handover = await both.prefill("a", PROMPT)
        await both.free()
        await both.p.submit(sequence("other", [5] * 200, max_tokens=40))
        await both.p.end("other")
        await both.decode("a", PROMPT, handover)
        assert (await both.d.end("a")).finish == "length"
        assert both.d.ids("a") != expected_ids(PROMPT, 10)
        stats = await both.d.call("control", "stats", {})
        assert (stats["stale_fetches"], stats["broken_fetches"]) == (1, 0)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_a_block_with_a_wrong_checksum_is_a_failed_transfer(mode, policy):
    fabric = NixlFabric(2048, 16384, timeout_s=10.0)
    p, d, of_p, of_d = SimEngine(fabric=fabric), SimEngine(), Seen(), Seen()
    args = {**SMALL, **MODES[mode], "load_failure": policy}
    infos = [await p.start(config(Role.PREFILL, args), of_p.sink), await d.start(config(Role.DECODE, args), of_d.sink)]
    try:
        d.meet({"p": infos[0].transfer_card})
        await p.submit(sequence("a", PROMPT, handover=Handover(kind="prefill")))
        params = (await of_p.end("a")).handover
        assert params is not None
        assert fabric.arena is not None
        fabric.arena.view(params["blocks"][2])[8000] ^= 1
        await d.submit(sequence("a", PROMPT, handover=Handover(kind="decode", params=params)))
        last = await of_d.end("a")
        if policy == "fail":
            assert "broken" in failed(last).message
        else:
            assert of_d.ids("a") == expected_ids(PROMPT, 10)
        assert (await d.control("stats", {}))["broken_fetches"] == 1
    finally:
        await p.stop(1.0)
        await d.stop(1.0)


async def test_engines_change_places():
    async with pair("push") as both:
        await both.decode("a", PROMPT, await both.prefill("a", PROMPT))
        await both.d.end("a")
        await both.free()
        await both.p.call("set_role", Role.DECODE)
        await both.d.call("set_role", Role.PREFILL)
        both.p, both.d = both.d, both.p
        prompt = PROMPT[::-1]
        await both.decode("b", prompt, await both.prefill("b", prompt))
        await both.d.end("b")
        assert both.d.ids("b") == expected_ids(prompt, 10)
        await both.free()


async def test_a_prefill_engine_that_has_not_met_the_decode_engine_yet_writes_all_the_same():
    async with pair("push") as both:
        await both.p.call("meet", {})
        await both.decode("a", PROMPT, await both.prefill("a", PROMPT))
        await both.d.end("a")
        assert both.d.ids("a") == expected_ids(PROMPT, 10)


async def test_an_engine_that_left_the_pool_is_not_reached():
    async with pair("pull", handshake_timeout_s=0.2, lease_s=1.0) as both:
        handover = await both.prefill("a", PROMPT)
        await both.d.call("meet", {})
        await both.decode("a", PROMPT, handover)
        assert "did not answer" in failed(await both.d.end("a")).message
        await both.free()


# -- deaths and stalls ---------------------------------------------------------------------------------------


@pytest.mark.fault
@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_a_prefill_engine_killed_before_the_transfer_is_noticed(mode):
    async with pair(mode, handshake_timeout_s=1.0) as both:
        await both.decode("first", PROMPT, await both.prefill("first", PROMPT))  # they have met
        await both.d.end("first")
        handover = await both.prefill("a", PROMPT[::-1])
        both.p.kill()
        await both.decode("a", PROMPT[::-1], handover)
        failed(await both.d.end("a"))
        await both.free()
        await both.d.submit(sequence("b", PROMPT))
        assert (await both.d.end("b")).finish == "length"


@pytest.mark.fault
@pytest.mark.parametrize("mode", ["push", "room"])
async def test_a_prefill_engine_killed_while_it_is_to_write_is_noticed(mode):
    async with pair(mode) as both:
        handover = await both.prefill("a", PROMPT, sim=STALL)
        await both.decode("a", PROMPT, handover)
        await until(lambda: uses(both.d, 5))
        both.p.kill()
        assert "went away" in failed(await both.d.end("a")).message
        await both.free()


@pytest.mark.fault
async def test_a_prefill_engine_killed_while_it_is_to_write_costs_a_prefill_where_that_is_wanted():
    async with pair("push", load_failure="recompute") as both:
        await both.decode("a", PROMPT, await both.prefill("a", PROMPT, sim=STALL))
        await until(lambda: uses(both.d, 5))
        both.p.kill()
        await both.d.end("a")
        assert both.d.ids("a") == expected_ids(PROMPT, 10)
        await both.free()


@pytest.mark.fault
@pytest.mark.parametrize("mode", MODES)
async def test_a_killed_decode_engine_costs_the_prefill_engine_nothing_for_long(mode):
    async with pair(mode, lease_s=1.0, room_timeout_s=1.0, transfer_timeout_s=1.0) as both:
        handover = await both.prefill("a", PROMPT, sim=STALL)
        await both.decode("a", PROMPT, handover, sim=STALL)
        await until(lambda: uses(both.d, 5))
        both.d.kill()
        await both.free()
        if mode == "room":
            failed(await both.p.end("a"))


@pytest.mark.fault
async def test_what_a_frozen_engine_may_still_write_to_is_kept_until_it_answers():
    async with pair("push", transfer_timeout_s=0.5) as both:
        handover = await both.prefill("a", PROMPT)
        both.p.freeze()
        await both.decode("a", PROMPT, handover)
        failed(await both.d.end("a"))
        assert await both.d.used() == 5
        both.p.thaw()
        await both.free()


@pytest.mark.parametrize("mode", MODES)
async def test_a_stalled_transfer_ends_at_its_deadline_and_leaves_nothing_behind(mode):
    async with pair(mode, transfer_timeout_s=0.3, room_timeout_s=0.3) as both:
        await both.decode("a", PROMPT, await both.prefill("a", PROMPT, sim=STALL), sim=STALL)
        failed(await both.d.end("a"))
        await both.free()


async def uses(side: Peer, blocks: int) -> bool:
    return await side.used() == blocks


# -- aborts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_an_abort_in_any_phase_leaves_no_block_behind(mode):
    slow = {"prefill_tokens_per_s": 2000.0, "decode_base_s": 0.002}
    prompt = [7] * 150
    async with pair(mode, lease_s=20.0, room_timeout_s=20.0, timing_overrides=slow, step_tokens=64) as both:
        p, d = both.p, both.d
        # while the prompt is computed
        await p.submit(sequence("a", prompt, handover=Handover(kind="prefill", room=900 if mode == "room" else None)))
        await until(lambda: any_used(p))
        await p.call("abort", ["a"])
        await both.free()
        # on offer, by each side
        for number, side in enumerate(("p", "d")):
            name = f"b{number}"
            handover = await both.prefill(name, prompt)
            if mode == "room":
                await until(lambda: uses(p, 38))
            if side == "p":
                await p.call("release", name, None)
            else:
                await both.decode(name, prompt, handover)
                await d.call("abort", [name])
            await both.free()
        # while the decode side waits for the transfer, by each side
        for number, aborted in enumerate((p, d)):
            name = f"c{number}"
            fresh = [8 + number] * 150
            handover = await both.prefill(name, fresh, sim=STALL)
            await both.decode(name, fresh, handover, sim=STALL)
            await until(lambda: uses(d, 38))
            await aborted.call("abort", [name])
            if aborted is p:
                if mode == "pull":  # who is read from has no say, and no longer any blocks
                    assert await none_used(p)
                    await d.call("abort", [name])
                else:
                    failed(await d.end(name))
            await both.free()
        # while it decodes
        await both.decode("e", prompt, await both.prefill("e", prompt), max_tokens=300)
        await until(lambda: emitted(d, "e"))
        await d.call("abort", ["e"])
        await both.free()
        # and all still works
        await both.decode("f", PROMPT, await both.prefill("f", PROMPT))
        await d.end("f")
        assert d.ids("f") == expected_ids(PROMPT, 10)
        await both.free()


async def any_used(side: Peer) -> bool:
    return await side.used() > 0


async def emitted(side: Peer, name: str) -> bool:
    return bool(side.ids(name))


# -- without NIXL --------------------------------------------------------------------------------------------


async def test_without_nixl_an_engine_that_hands_over_does_not_start_and_says_why(monkeypatch):
    def missing() -> Any:
        raise NixlUnavailable("NIXL does not load; install it")

    monkeypatch.setattr("headrace.workers.nixl.driver.bindings", missing)
    with pytest.raises(EngineStartFailed, match="NIXL"):
        await SimEngine().start(config(Role.PREFILL, SMALL), lambda outputs: None)
    plain = SimEngine()
    await plain.start(config(Role.AGGREGATED, SMALL), lambda outputs: None)
    await plain.stop(1.0)
