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
from headrace.workers.errors import EngineDead, EngineStartFailed, RequestInvalid
from headrace.workers.sim.engine import SimEngine
from headrace.workers.sim.step_driver import EventBuffer
from headrace.workers.sim.tokens import expected_ids


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
