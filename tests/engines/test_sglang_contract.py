"""The engine contract, with the real SGLang, started with all that the bundled model can have; and the tokens, refusals and
metrics that only SGLang has.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import generate_latest

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import Engine, EngineConfig
from headrace.workers.errors import EngineStartFailed, RequestInvalid
from headrace.workers.sglang.engine import SUPPORT, SglangEngine
from tests.engine_contract.caching import CachingContract
from tests.engine_contract.generating import GeneratingContract
from tests.engine_contract.life import HealthContract, KilledContract, descendants
from tests.engine_contract.operations import GeneratingOperationsContract
from tests.engine_contract.options import OptionsContract
from tests.engine_contract.sampling import SamplingContract
from tests.engine_contract.subject import Means, Subject, started
from tests.engines.conftest import DIRECT_TOKENS, ask_directly
from tests.engines.support.sglang_args import ARGS as DIRECT_ARGS
from tests.engines.test_vllm_adapters import write_adapter

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(700),
    pytest.mark.filterwarnings("default"),  # SGLang and torch warn about themselves
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="`make install ENGINE=sglang` was not run"),
]

ARGS = {
    "dtype": "float32",
    "context_length": 512,
    "max_total_tokens": 2560,
    "max_running_requests": 4,
    "enable_lora": True,
    "max_lora_rank": 8,
    "max_loras_per_batch": 2,
    "lora_target_modules": ["q_proj", "v_proj"],
    "enable_priority_scheduling": True,
}


async def kill(engine: Engine) -> None:
    """Kill what computes, as a lack of memory would: SGLang then ends its other processes itself."""
    assert isinstance(engine, SglangEngine)
    processes = engine._processes.alive()
    (scheduler,) = [pid for pid in processes if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(scheduler, signal.SIGKILL)


@pytest.fixture(scope="module")
def alone(cut_model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    order = {"model": str(cut_model_dir), "args": DIRECT_ARGS, "prompts": prompts, "max_tokens": DIRECT_TOKENS}
    answers = ask_directly("direct_sglang", order, environ={}, timeout_s=600)
    assert len({tuple(answer) for answer in answers}) == len(prompts)
    return answers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(
    cut_model_dir: Path, tmp_path_factory: pytest.TempPathFactory, alone: list[list[int]]
) -> AsyncIterator[Subject]:
    """Depends on `alone` only so that the two engines are not up at the same time."""
    folder = tmp_path_factory.mktemp("adapters")
    adapters = tuple(str(write_adapter(folder / name, cut_model_dir, seed=n)) for n, name in enumerate(("one", "other")))
    means = Means(adapters=adapters, kill=kill, start_s=420.0, least_rank=0, senseless=True)
    config = EngineConfig(model=str(cut_model_dir), served_name="m", args=ARGS)
    async with started(SglangEngine, config, SUPPORT, means) as made:
        yield made


class TestSglang(
    GeneratingContract, SamplingContract, OptionsContract, CachingContract, GeneratingOperationsContract, HealthContract
):
    """One engine for all."""


async def test_these_settings_show_every_ability_that_sglang_declares(subject: Subject) -> None:
    assert subject.declared | SUPPORT.untried.keys() == SUPPORT.words
    assert not subject.declared & SUPPORT.untried.keys()


async def test_greedy_tokens_equal_those_of_sglang_itself(
    subject: Subject, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    for prompt, expected in zip(prompts, alone, strict=True):
        assert await subject.ids(prompt, Sampling(temperature=0.0, max_tokens=DIRECT_TOKENS)) == expected


async def test_what_sglang_itself_refuses_is_a_refused_request(subject: Subject, prompts: list[list[int]]) -> None:
    with pytest.raises(RequestInvalid, match="top_p"):
        await subject.submit(prompts[0], Sampling(max_tokens=4, top_p=2.0))
    late = (await subject.run(prompts[0], guided={"regex": "[a-z"}))[-1].fault
    assert late is not None
    assert (late.code, late.retriable) == ("invalid_request", False)


async def test_its_own_metrics_are_among_the_workers(subject: Subject) -> None:
    assert b"sglang:" in generate_latest()


async def test_a_setting_that_it_lacks_stops_the_start(model_dir: Path) -> None:
    args: dict[str, Any] = {"pagesize": 1}
    with pytest.raises(EngineStartFailed, match="page_size"):
        await SglangEngine().start(EngineConfig(model=str(model_dir), served_name="x", args=args), lambda outputs: None)


class TestEnd(KilledContract):
    """The last one: it kills the engine."""

    @pytest.fixture
    def before(self, subject: Subject) -> set[int]:
        assert isinstance(subject.engine, SglangEngine)
        return descendants(os.getpid()) - set(subject.engine._processes.alive())
