"""Contract of operations, adapters, sleep and roles."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.workers.engine import Handover, PoolItem, Role
from headrace.workers.errors import EngineError, EngineOverloaded, UnsupportedByEngine
from tests.engine_contract.subject import Subject, greedy

KNOWN_ELSEWHERE = ("load_adapter", "unload_adapter", "reset_prefix_cache", "stats", "replay_kv_events", "release_handover")
KNOWN_ELSEWHERE += ("sleep", "wake", "pause", "resume", "is_paused", "start_profile", "stop_profile", "flush_cache", "fly")
DRIVEN = {"load_adapter", "unload_adapter", "reset_prefix_cache", "stats", "replay_kv_events", "release_handover"}
DRIVEN |= {"sleep", "wake", "pause", "resume", "is_paused", "start_profile", "stop_profile"}
"""The operations that a test here calls."""


class OperationsContract:
    """`control`, of generating and pooling engines alike."""

    @pytest.mark.parametrize("operation", KNOWN_ELSEWHERE)
    async def test_an_undeclared_operation_is_refused_by_name(self, subject: Subject, operation: str) -> None:
        if operation in subject.engine.capabilities.operations:
            return
        with pytest.raises(UnsupportedByEngine, match=operation):
            await subject.engine.control(operation, {"name": "x", "source": "y"} if "adapter" in operation else {})

    async def test_each_declared_operation_has_a_test(self, subject: Subject) -> None:
        untried = {word.removeprefix("operation ") for word in subject.support.untried}
        assert subject.engine.capabilities.operations <= DRIVEN | untried

    async def test_declared_operations_that_only_look_or_reset_work(self, subject: Subject) -> None:
        able = subject.engine.capabilities.operations
        for operation in sorted(able & {"reset_prefix_cache", "stats", "is_paused", "replay_kv_events"}):
            assert isinstance(await subject.engine.control(operation, {}), dict), operation
        if "release_handover" in able:
            assert await subject.engine.control("release_handover", {"request": "unknown"})

    async def test_peers_and_releases_of_nothing_do_nothing(self, subject: Subject) -> None:
        subject.engine.meet({})
        await subject.engine.release("unknown", None)


class GeneratingOperationsContract(OperationsContract):
    """What changes a generating engine while it serves."""

    async def test_a_paused_engine_goes_on_when_resumed(self, subject: Subject) -> None:
        if not {"operation pause", "operation resume"} <= subject.declared:
            return
        before = await subject.ids(subject.prompt(700), greedy(100))
        running = await subject.submit(subject.prompt(700), greedy(100))
        await subject.engine.control("pause", {"mode": "keep"})
        try:
            came, still_s = 0, 0.0
            while still_s < 1.0:  # a step that ran ends, however slow this machine is
                await asyncio.sleep(0.1)
                still_s = still_s + 0.1 if len(subject.outputs[running]) == came else 0.0
                came = len(subject.outputs[running])
            assert not subject._ended[running].is_set(), "a paused engine makes no steps"
        finally:  # the engine is that of the other tests too
            await subject.engine.control("resume", {})
        outputs = await subject.end(running)
        assert [token for output in outputs for token in output.ids] == before

    async def test_a_profile_of_steps_is_written_where_declared(self, subject: Subject) -> None:
        if "operation start_profile" not in subject.declared:
            return
        began = await subject.engine.control("start_profile", {})
        with pytest.raises(EngineError):
            await subject.engine.control("start_profile", {})
        await subject.ids(subject.prompt(707), greedy(3))
        ended = await subject.engine.control("stop_profile", {})
        written = [path for path in Path(str(began["folder"])).rglob("*") if path.is_file() and path.stat().st_size]
        assert written, (began, ended)

    async def test_sleep_refuses_sequences_until_it_is_woken(self, subject: Subject) -> None:
        levels = subject.engine.capabilities.sleep_levels
        before = await subject.ids(subject.prompt(701), greedy(6)) if levels else []
        for level in levels:
            await subject.engine.control("sleep", {"level": level})
            with pytest.raises(EngineOverloaded):
                await subject.submit(subject.prompt(701), greedy(6))
            await subject.engine.healthy()
            await subject.engine.control("wake", {})
            assert await subject.ids(subject.prompt(701), greedy(6)) == before

    async def test_an_unknown_adapter_is_refused(self, subject: Subject) -> None:
        await subject.refuses("adapter", subject.prompt(702), adapter="nobody")

    async def test_adapters_come_and_go_where_declared(self, subject: Subject) -> None:
        if "lora dynamic" not in subject.declared:
            return
        control, prompt = subject.engine.control, subject.prompt(703, 3.5)
        one, other = subject.means.adapters
        plain = await subject.ids(prompt, greedy(8))
        await control("load_adapter", {"name": "contract", "source": one})
        await control("load_adapter", {"name": "contract", "source": one})  # the same one again is fine
        with pytest.raises(EngineError, match="contract"):
            await control("load_adapter", {"name": "contract", "source": other})
        first = await subject.run(prompt, greedy(8), adapter="contract")
        assert first[0].cached_tokens == 0, "an adapter's cache is its own"
        assert [token for output in first for token in output.ids] != plain
        assert await subject.ids(prompt, greedy(8)) == plain
        await control("unload_adapter", {"name": "contract"})
        await control("unload_adapter", {"name": "contract"})
        await subject.refuses("contract", prompt, adapter="contract")

    async def test_adapters_of_the_start_are_served(self, subject: Subject) -> None:
        prompt = subject.prompt(704)
        for name in subject.info.adapters:
            assert await subject.ids(prompt, greedy(8), adapter=name) != await subject.ids(prompt, greedy(8))

    @pytest.mark.parametrize("role", list(Role))
    async def test_a_role_is_taken_where_declared_and_refused_elsewhere(self, subject: Subject, role: Role) -> None:
        await subject.idle()
        if role in subject.engine.capabilities.roles:
            await subject.engine.set_role(role)
            assert len(await subject.ids(subject.prompt(705), greedy(2))) == 2, "a plain sequence is served in any role"
            await subject.engine.set_role(Role.AGGREGATED)
            return
        with pytest.raises(UnsupportedByEngine, match=role.value):
            await subject.engine.set_role(role)

    @pytest.mark.parametrize("kind", ["prefill", "decode"])
    async def test_a_hand_over_is_refused_where_none_is_declared(self, subject: Subject, kind: str) -> None:
        if subject.engine.capabilities.disagg.value == "none":
            handover = Handover(kind=kind, params={}, room=1, peer="x")  # type: ignore[arg-type]
            await subject.refuses(kind, subject.prompt(706), handover=handover)

    async def test_vectors_are_refused(self, subject: Subject) -> None:
        with pytest.raises(UnsupportedByEngine):
            await subject.engine.pool(PoolItem(id="v", task="embed", token_ids=[1, 2, 3]))
