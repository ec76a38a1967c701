"""The SGLang adapter against the real SGLang, on a CPU. The last tests kill the engine that all others share."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import generate_latest

from headrace.broker.messages import Sampling
from headrace.workers.engine import EngineConfig, EngineInfo, Output, Role, Sequence
from headrace.workers.errors import EngineDead, EngineStartFailed, RequestInvalid, UnsupportedByEngine
from headrace.workers.sglang.engine import SglangEngine
from tests.engines.conftest import DIRECT_TOKENS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed: make install ENGINE=sglang"),
]

ARGS: dict[str, Any] = {
    "dtype": "float32",
    "context_length": 1024,
    "max_total_tokens": 4096,
    "max_running_requests": 2,
    "enable_priority_scheduling": True,
    "enable_lora": True,
    "max_lora_rank": 8,
    "lora_target_modules": ["q_proj", "v_proj"],
    "max_loras_per_batch": 2,
}
GREEDY = Sampling(temperature=0.0, max_tokens=DIRECT_TOKENS)
START_S = 300


class Bench:
    def __init__(self) -> None:
        self.engine = SglangEngine()
        self.info: EngineInfo | None = None
        self.outputs: dict[str, list[Output]] = {}
        self.ended: dict[str, asyncio.Event] = {}
        self.order: list[str] = []
        self._numbers = itertools.count()

    def sink(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.outputs[output.id].append(output)
            if output.finish or output.fault:
                self.order.append(output.id)
                self.ended[output.id].set()

    async def submit(self, token_ids: list[int], sampling: Sampling | None = None, **options: Any) -> str:
        name = f"t{next(self._numbers)}-1-0"
        self.outputs[name] = []
        self.ended[name] = asyncio.Event()
        sampling = sampling or Sampling(temperature=0.0, max_tokens=8)
        options = {"prompt_tokens": len(token_ids)} | options
        await self.engine.submit(Sequence(id=name, token_ids=list(token_ids), sampling=sampling, **options))
        return name

    async def end(self, name: str) -> list[Output]:
        async with asyncio.timeout(120):
            await self.ended[name].wait()
        return self.outputs[name]

    async def ids(self, token_ids: list[int], sampling: Sampling | None = None, **options: Any) -> list[int]:
        outputs = await self.end(await self.submit(token_ids, sampling, **options))
        assert outputs[-1].fault is None, outputs[-1].fault
        return [token for output in outputs for token in output.ids]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def bench(model_dir: Path, direct_sglang: list[list[int]]) -> AsyncIterator[Bench]:
    """Depends on `direct_sglang` only so that the two engines are not up at the same time."""
    bench = Bench()
    async with asyncio.timeout(START_S):
        bench.info = await bench.engine.start(EngineConfig(model=str(model_dir), served_name="small", args=ARGS), bench.sink)
    yield bench
    await bench.engine.stop(5.0)


async def test_it_says_what_it_is(bench: Bench, model_dir: Path) -> None:
    info, able = bench.info, bench.engine.capabilities
    assert info is not None
    assert (info.engine, info.tokenizer_dir, info.slots, info.block_size) == ("sglang", str(model_dir), 2, 32)
    assert (info.context_length, info.blocks, info.vocab_size, info.eos_token_ids) == (1018, 128, 49152, (2,))
    assert (able.priority, able.lora, able.kv_events, able.logprobs) == (True, "dynamic", True, True)


async def test_greedy_tokens_equal_those_of_sglang_itself(
    bench: Bench, prompts: list[list[int]], direct_sglang: list[list[int]], tokenizer: Any
) -> None:
    for prompt, expected in zip(prompts, direct_sglang, strict=True):
        assert await bench.ids(prompt, GREEDY) == expected
    assert "Paris" in tokenizer.decode(direct_sglang[0])


async def test_an_interrupted_answer_goes_on_with_the_same_tokens(bench: Bench, prompts: list[list[int]]) -> None:
    whole = await bench.ids(prompts[2], GREEDY)
    cut = len(whole) // 2
    rest = Sampling(temperature=0.0, max_tokens=DIRECT_TOKENS - cut)
    assert await bench.ids(prompts[2] + whole[:cut], rest, prompt_tokens=len(prompts[2])) == whole[cut:]


async def test_a_repeated_prompt_is_found_in_the_cache_unless_it_is_salted(bench: Bench, prompts: list[list[int]]) -> None:
    await bench.engine.control("reset_prefix_cache", {})
    first = (await bench.end(await bench.submit(prompts[0])))[0]
    again = (await bench.end(await bench.submit(prompts[0])))[0]
    salted = (await bench.end(await bench.submit(prompts[0], cache_salt="tenant")))[0]
    assert (first.cached_tokens, again.cached_tokens, salted.cached_tokens) == (0, 32, 0)


async def test_the_more_urgent_of_two_waiting_sequences_runs_first(bench: Bench, prompts: list[list[int]]) -> None:
    long = Sampling(temperature=0.0, max_tokens=60, ignore_eos=True)
    busy = [await bench.submit(prompts[0], long, priority=0) for _ in range(2)]
    late = await bench.submit(prompts[1], priority=9)
    soon = await bench.submit(prompts[2], priority=1)
    for name in (*busy, late, soon):
        await bench.end(name)
    assert bench.order.index(soon) < bench.order.index(late)


async def test_aborted_sequences_are_silent_and_free_their_places(bench: Bench, prompts: list[list[int]]) -> None:
    names = [await bench.submit(prompts[0], Sampling(temperature=0.0, max_tokens=900, ignore_eos=True)) for _ in range(2)]
    await bench.engine.abort([*names, "unknown"])
    heard = [len(bench.outputs[name]) for name in names]
    await bench.ids(prompts[1], Sampling(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert [len(bench.outputs[name]) for name in names] == heard
    assert (bench.engine.load().running, bench.engine.load().waiting) == (0, 0)


async def test_logprobs_of_answer_and_prompt(bench: Bench, prompts: list[list[int]]) -> None:
    outputs = await bench.end(await bench.submit(prompts[0], GREEDY, logprobs=3, prompt_logprobs=2))
    for output in outputs:
        assert output.logprobs is not None
        for token, row in zip(output.ids, output.logprobs, strict=True):
            assert (row.id, row.top[0][0], len(row.top)) == (token, token, 3)
    scores = outputs[0].prompt_logprobs
    assert scores is not None
    assert scores[0] is None
    assert [score.id for score in scores[1:] if score] == prompts[0][1:]


@pytest.mark.parametrize(
    ("guided", "fits"),
    [
        ({"regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdigit()),
        ({"choice": ["red", 'gr"een']}, lambda text: text in ("red", 'gr"een')),
        (
            {"json": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}},
            lambda t: "a" in json.loads(t),
        ),
        ({"grammar": 'root ::= "yes" | "no"'}, lambda text: text in ("yes", "no")),
    ],
)
async def test_structured_output(bench: Bench, prompts: list[list[int]], tokenizer: Any, guided: Any, fits: Any) -> None:
    ids = await bench.ids(prompts[0], GREEDY, guided=guided)
    assert fits(tokenizer.decode(ids)), tokenizer.decode(ids)


async def test_what_cannot_work_is_refused_with_its_name(bench: Bench, prompts: list[list[int]]) -> None:
    with pytest.raises(RequestInvalid, match="top_p"):
        await bench.submit(prompts[0], Sampling(max_tokens=4, top_p=2.0))
    with pytest.raises(UnsupportedByEngine) as told:
        await bench.submit(prompts[0], Sampling(max_tokens=4, bad_words=["x"]))
    assert told.value.param == "bad_words"
    with pytest.raises(RequestInvalid, match="nope"):
        await bench.submit(prompts[0], adapter="nope")
    wrong = (await bench.end(await bench.submit(prompts[0], guided={"regex": "[a-z"})))[-1].fault
    assert wrong is not None
    assert (wrong.code, wrong.retriable) == ("invalid_request", False)


async def test_adapters_come_and_go_and_change_the_answer(
    bench: Bench, prompts: list[list[int]], model_dir: Path, tmp_path: Path
) -> None:
    make_adapter(model_dir, tmp_path / "loud")
    before = (await bench.end(await bench.submit(prompts[0], logprobs=1)))[0].logprobs
    await bench.engine.control("load_adapter", {"name": "loud", "source": str(tmp_path / "loud")})
    loud = (await bench.end(await bench.submit(prompts[0], logprobs=1, adapter="loud")))[0]
    assert before is not None
    assert loud.logprobs is not None
    assert loud.cached_tokens == 0
    assert loud.logprobs[0].logprob != pytest.approx(before[0].logprob, abs=1e-4)
    await bench.engine.control("unload_adapter", {"name": "loud"})
    with pytest.raises(RequestInvalid, match="loud"):
        await bench.submit(prompts[0], adapter="loud")


def make_adapter(model_dir: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    config = json.loads((model_dir / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(layers):
        for module, size in (("q_proj", hidden), ("v_proj", kv)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(8, hidden, generator=generator) * 0.05
            tensors[f"{name}.lora_B.weight"] = torch.randn(size, 8, generator=generator) * 0.05
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "peft_type": "LORA", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about))


async def test_its_own_metrics_are_among_the_workers(bench: Bench) -> None:
    assert b"sglang:" in generate_latest()


async def test_it_stays_in_its_role(bench: Bench) -> None:
    with pytest.raises(UnsupportedByEngine, match="aggregated"):
        await bench.engine.set_role(Role.PREFILL)


async def test_a_setting_that_it_lacks_stops_the_start(model_dir: Path) -> None:
    engine = SglangEngine()
    with pytest.raises(EngineStartFailed, match="page_size"):
        await engine.start(EngineConfig(model=str(model_dir), served_name="x", args={"pagesize": 1}), lambda outputs: None)


async def test_when_its_scheduler_is_killed_the_engine_dies_and_leaves_no_process(
    bench: Bench, prompts: list[list[int]]
) -> None:
    """Last: it ends the engine of this module."""
    engine = bench.engine
    await bench.submit(prompts[0], Sampling(temperature=0.0, max_tokens=900, ignore_eos=True))
    child = engine.child_pid
    assert child is not None
    below = descendants(child)
    scheduler = [pid for pid in below if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert scheduler, below
    os.kill(scheduler[0], signal.SIGKILL)
    async with asyncio.timeout(60):
        assert "SGLang" in await engine.died()
    with pytest.raises(EngineDead):
        await engine.healthy()
    await engine.stop(5.0)
    assert [pid for pid in (child, *below) if lives(pid)] == []


def descendants(pid: int) -> list[int]:
    children = [int(child) for one in Path(f"/proc/{pid}/task").glob("*/children") for child in one.read_text().split()]
    return children + [lower for child in children for lower in descendants(child)]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
