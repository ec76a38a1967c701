"""The engine contract, with the real SGLang, started with all that the bundled model can have."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.workers.engine import Engine, EngineConfig
from headrace.workers.sglang.engine import SglangEngine
from headrace.workers.sglang.support import SUPPORT
from tests.engine_contract.caching import CachingContract
from tests.engine_contract.generating import GeneratingContract
from tests.engine_contract.life import HealthContract, KilledContract, descendants
from tests.engine_contract.operations import GeneratingOperationsContract
from tests.engine_contract.options import OptionsContract
from tests.engine_contract.subject import Means, Subject, started
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
    """Kill every process of SGLang, as a lack of memory would one of them."""
    assert isinstance(engine, SglangEngine)
    for pid in engine._processes.alive():
        os.kill(pid, signal.SIGKILL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    folder = tmp_path_factory.mktemp("adapters")
    adapters = tuple(str(write_adapter(folder / name, model_dir, seed=n)) for n, name in enumerate(("one", "other")))
    means = Means(adapters=adapters, kill=kill, start_s=420.0, least_rank=0)
    config = EngineConfig(model=str(model_dir), served_name="m", args=ARGS)
    async with started(SglangEngine, config, SUPPORT, means) as made:
        yield made


class TestSglang(GeneratingContract, OptionsContract, CachingContract, GeneratingOperationsContract, HealthContract):
    """One engine for all."""


async def test_these_settings_show_every_ability_that_sglang_declares(subject: Subject) -> None:
    assert subject.declared | SUPPORT.untried.keys() == SUPPORT.words
    assert not subject.declared & SUPPORT.untried.keys()


class TestEnd(KilledContract):
    """The last one: it kills the engine."""

    @pytest.fixture
    def before(self, subject: Subject) -> set[int]:
        assert isinstance(subject.engine, SglangEngine)
        return descendants(os.getpid()) - set(subject.engine._processes.alive())
