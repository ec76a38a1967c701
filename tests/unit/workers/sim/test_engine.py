"""The simulator behind the engine protocol, and offline."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable

import pytest

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import EngineConfig, KvEvent, Output, Role, Sequence
from headrace.workers.errors import EngineDead, EngineOverloaded, EngineStartFailed, RequestInvalid
from headrace.workers.sim.engine import SimEngine
from headrace.workers.sim.settings import parse_settings
from headrace.workers.sim.step_driver import EventBuffer
from headrace.workers.sim.tokens import expected_ids
from tests.support.sim_replay import replay


def sequence(name: str, tokens: list[int], *, max_tokens: int = 10, **options) -> Sequence:
    return Sequence(id=name, token_ids=tokens, prompt_tokens=len(tokens), sampling=Sampling(max_tokens=max_tokens), **options)


class Bench:
    """An engine and all that came out of it."""

    def __init__(self, engine: SimEngine) -> None:
        self.engine = engine
        self.steps: list[list[Output]] = []
        self._changed = asyncio.Event()

    def sink(self, outputs: list[Output]) -> None:
        self.steps.append(outputs)
        self._changed.set()

    def ids(self, name: str) -> list[int]:
        return [token for step in self.steps for output in step if output.id == name for token in output.ids]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def finished(self, name: str) -> bool:
        return any(output.finish or output.fault for step in self.steps for output in step if output.id == name)


@contextlib.asynccontextmanager
async def started(kill: Callable[[], None] | None = None, **args) -> AsyncIterator[Bench]:
    bench = Bench(SimEngine(kill=kill) if kill else SimEngine())
    await bench.engine.start(EngineConfig(model="sim", served_name="sim", args=args), bench.sink)
    try:
        yield bench
    finally:
        await bench.engine.stop(1.0)


async def test_every_sequence_gets_its_expected_tokens_a_step_at_a_time():
    async with started() as bench:
        for n in range(5):
            await bench.engine.submit(sequence(str(n), [n + 1] * 40, max_tokens=20))
        await bench.until(lambda: all(bench.finished(str(n)) for n in range(5)))
        for n in range(5):
            assert bench.ids(str(n)) == expected_ids([n + 1] * 40, 20)
        assert max(len(step) for step in bench.steps) == 5


async def test_nothing_comes_out_after_an_abort_even_of_the_step_that_runs():
    async with started(timing="cpu-small") as bench:
        await bench.engine.submit(sequence("a", [1]))
        await bench.engine.submit(sequence("b", [2], max_tokens=1))
        await asyncio.sleep(0.001)  # the step is under way: b is over inside the engine
        await bench.engine.abort(["a", "b", "unknown"])
        await bench.engine.submit(sequence("c", [3], max_tokens=1))
        await bench.until(lambda: bench.finished("c"))
        assert bench.ids("a") == bench.ids("b") == []
        assert bench.engine.load().blocks_used == 0


async def test_steps_take_the_modelled_time_without_drift():
    async with started(timing="cpu-small", speedup=20) as bench:
        clock = asyncio.get_running_loop().time
        began = clock()
        await bench.engine.submit(sequence("a", [1], max_tokens=100))
        await bench.until(lambda: bench.finished("a"))
        modelled = 100 * (0.02104 + 0.0007) / 20
        assert clock() - began >= 0.99 * modelled


async def test_offline_gives_the_same_tokens_as_real_time():
    work = [sequence(str(n), [n % 3] * (10 + 7 * n), max_tokens=15) for n in range(12)]
    args = {"slots": 3, "blocks": 16, "block_size": 8, "context_length": 128, "step_tokens": 32}
    async with started(**args) as bench:
        for item in work:
            await bench.engine.submit(item)
        await bench.until(lambda: all(bench.finished(item.id) for item in work))
        offline = replay([(0.0, item) for item in work], parse_settings(args))
        assert {line.id: line.ids for line in offline.timelines} == {item.id: bench.ids(item.id) for item in work}
        assert all(line.finish == "length" for line in offline.timelines)


def test_offline_times_follow_the_model():
    settings = parse_settings({"timing": "cpu-small"})
    first = sequence("a", [1] * 860, max_tokens=3)
    second = sequence("b", [2] * 86, max_tokens=1)
    done = replay([(10.0, first), (10.5, second)], settings)
    a, b = done.timelines
    base, per_sequence = 0.02104, 0.0007
    assert a.ttft_s == pytest.approx(base + 1.0)
    assert a.itl_s == pytest.approx([base + per_sequence + 0.1, base + per_sequence])
    assert b.ttft_s == pytest.approx(0.5 + base + base + per_sequence + 0.1)
    assert done.end_s == a.finished_s


def test_offline_ends_with_a_dead_engine_and_reports_refusals():
    done = replay(
        [(0.0, sequence("a", [1])), (0.0, sequence("b", [1] * 40)), (9.0, sequence("c", [1]))],
        parse_settings({"context_length": 32, "faults": {"die_at_step": 3}}),
    )
    assert done.died
    assert [(len(line.ids), line.finish, line.error is None) for line in done.timelines] == [(3, None, True), (0, None, False)]


# -- faults and failures -------------------------------------------------------------------------------------


async def test_a_dead_engine_says_so_everywhere():
    async with started(faults={"die_at_step": 1}) as bench:
        await bench.engine.submit(sequence("a", [1]))
        async with asyncio.timeout(5):
            reason = await bench.engine.died()
        assert "dead at step 1" in reason
        for call in (bench.engine.healthy(), bench.engine.submit(sequence("b", [1]))):
            with pytest.raises(EngineDead, match="dead at step 1"):
                await call
        assert len(bench.ids("a")) == 1


async def test_a_dead_engine_names_the_sequence_that_it_died_of():
    async with started(faults={"die_at_token": 1}) as bench:
        assert bench.engine.blamed() == frozenset()
        await bench.engine.submit(sequence("a", [1]))
        async with asyncio.timeout(5):
            await bench.engine.died()
        assert bench.engine.blamed() == {"a"}


async def test_a_failing_sink_kills_the_engine_not_silently():
    engine = SimEngine()

    def sink(outputs: list[Output]) -> None:
        raise RuntimeError("full")

    await engine.start(EngineConfig(model="sim", served_name="m"), sink)
    await engine.submit(sequence("a", [1]))
    async with asyncio.timeout(5):
        assert await engine.died() == "RuntimeError: full"
    await engine.stop(1.0)


async def test_a_crash_kills_before_the_token_is_out():
    killed = asyncio.Event()
    async with started(kill=killed.set, faults={"crash_at_token": 3}) as bench:
        await bench.engine.submit(sequence("a", [1]))
        async with asyncio.timeout(5):
            await killed.wait()
        assert bench.ids("a") == expected_ids([1], 3)


async def test_submit_raises_what_it_was_told_to():
    for name, error in (("overloaded", EngineOverloaded), ("invalid", RequestInvalid), ("dead", EngineDead)):
        async with started(faults={"reject": name}) as bench:
            with pytest.raises(error, match="injected"):
                await bench.engine.submit(sequence("a", [1]))


async def test_a_request_brings_faults_only_where_that_is_allowed():
    faulty = sequence("a", [1], extra={"sim": {"fault_at_token": 2}})
    async with started() as bench:
        with pytest.raises(RequestInvalid, match="allow_request_faults"):
            await bench.engine.submit(faulty)
    async with started(allow_request_faults=True) as bench:
        await bench.engine.submit(faulty)
        await bench.engine.submit(sequence("b", [1]))
        await bench.until(lambda: bench.finished("a") and bench.finished("b"))
        assert (len(bench.ids("a")), len(bench.ids("b"))) == (2, 10)
        with pytest.raises(RequestInvalid, match="explode"):
            await bench.engine.submit(sequence("c", [1], extra={"sim": {"explode": 1}}))


@pytest.mark.parametrize("alternatives", [0, 3])
async def test_prompts_are_scored_once_and_each_token_by_itself(alternatives):
    async with started() as bench:
        assert bench.engine.capabilities.prompt_logprobs
        await bench.engine.submit(sequence("a", [1, 2, 30], max_tokens=3, prompt_logprobs=alternatives))
        resumed = Sequence(
            id="b", token_ids=[1, 2, 30, 77], prompt_tokens=3, sampling=Sampling(max_tokens=3), prompt_logprobs=alternatives
        )
        await bench.engine.submit(resumed)
        await bench.engine.submit(sequence("c", [1, 2, 30], max_tokens=3))
        await bench.until(lambda: all(bench.finished(name) for name in "abc"))
        first = {name: [o.prompt_logprobs for step in bench.steps for o in step if o.id == name] for name in "abc"}
        scores, *later = first["a"]
        assert later == [None, None]
        assert first["b"][0] == scores
        assert first["c"] == [None, None, None]
        assert scores[0] is None
        assert [(score.id, score.rank, len(score.top)) for score in scores[1:]] == [(2, 1, alternatives), (30, 1, alternatives)]
        assert all(score.logprob < 0 for score in scores[1:])


async def test_bad_settings_fail_the_start():
    engine = SimEngine()
    for config in (
        EngineConfig(model="sim", served_name="m", args={"blocks": -1}),
        EngineConfig(model="sim", served_name="m", role=Role.ENCODE),
        EngineConfig(model="sim", served_name="m", args={"tokenizer_dir": "nowhere"}),
    ):
        with pytest.raises(EngineStartFailed):
            await engine.start(config, lambda outputs: None)
    with pytest.raises(EngineDead, match="not started"):
        await engine.healthy()


@pytest.mark.slow
def test_it_needs_neither_torch_nor_transformers_nor_tokenizers():
    program = (
        "import asyncio, sys\n"
        "from headrace.workers.sim.engine import SimEngine\n"
        "from headrace.workers.engine import EngineConfig\n"
        "async def main():\n"
        "    engine = SimEngine()\n"
        "    await engine.start(EngineConfig(model='sim', served_name='m'), print)\n"
        "    await engine.stop(1.0)\n"
        "asyncio.run(main())\n"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'numpy'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# -- KV events and operations --------------------------------------------------------------------------------


async def test_a_reader_that_falls_behind_gets_the_present_state_instead_of_a_gap():
    buffer = EventBuffer(most_steps=2)
    now = [KvEvent(kind="stored", hashes=[9])]
    reader = buffer.read(lambda: now)
    await anext(reader)
    for value in range(3):
        buffer.put([KvEvent(kind="stored", hashes=[value])], lambda: now)
    assert [event.kind for event in await anext(reader)] == ["cleared", "stored"]
    buffer.put([KvEvent(kind="removed", hashes=[9])], lambda: now)
    assert [event.kind for event in await anext(reader)] == ["removed"]
    await reader.aclose()


async def test_a_folder_for_the_disk_tier_is_refused_by_name() -> None:
    with pytest.raises(EngineStartFailed, match="no argument 'disk_path'"):
        async with started(disk_blocks=8, disk_path="folder"):
            pass
