"""The engine contract, with the real vLLM: as it starts by default, and with all that its settings can switch on."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.workers.engine import Engine, EngineConfig, StoredTensor, read_matrix
from headrace.workers.vllm.engine import SUPPORT, VllmEngine
from tests.engine_contract.caching import CachingContract
from tests.engine_contract.generating import GeneratingContract
from tests.engine_contract.life import HealthContract, KilledContract, descendants
from tests.engine_contract.operations import GeneratingOperationsContract
from tests.engine_contract.options import OptionsContract
from tests.engine_contract.sampling import SamplingContract
from tests.engine_contract.subject import Means, Subject, started
from tests.engines.conftest import ARGS, Bench
from tests.engines.test_vllm_adapters import write_adapter

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),  # vLLM and torch warn about themselves
]

ALL = ARGS | {
    "max_model_len": 512,
    "kv_cache_memory_bytes": 48 << 20,
    "max_num_seqs": 4,
    "enable_lora": True,
    "max_lora_rank": 8,
    "max_cpu_loras": 4,
    "enable_prompt_embeds": True,
    "scheduling_policy": "priority",
}


def rows_of(model_dir: Path) -> Any:
    """The model's own embeddings: a row per token."""
    from safetensors import safe_open

    (name,) = model_dir.glob("*.safetensors")
    with safe_open(name, "pt") as weights:
        return weights.get_tensor("model.embed_tokens.weight").float()


async def kill(engine: Engine) -> None:
    """Kill the core, as a lack of memory would."""
    assert isinstance(engine, VllmEngine)
    core = engine._processes.alive()
    assert core
    for pid in core:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def bench_model(cut_model_dir: Path) -> Path:
    return cut_model_dir


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plain(bench: Bench) -> Subject:
    assert bench.info is not None
    subject = Subject(engine=bench.engine, support=SUPPORT, means=Means(senseless=True), info=bench.info)
    subject.calls, subject.outputs, subject._ended = bench.calls, bench.outputs, bench.ended
    return subject


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def rich(cut_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    import torch

    folder = tmp_path_factory.mktemp("adapters")
    rows = rows_of(cut_model_dir)

    def embeds(tokens: list[int]) -> StoredTensor:
        file = io.BytesIO()
        torch.save(rows[tokens], file)
        return read_matrix(file.getvalue(), param="prompt_embeds")

    adapters = tuple(str(write_adapter(folder / name, cut_model_dir, seed=n)) for n, name in enumerate(("one", "other")))
    means = Means(adapters=adapters, embeds=embeds, kill=kill, start_s=240.0, senseless=True)
    profiler = {"profiler": "torch", "torch_profiler_dir": str(folder / "profiles"), "torch_profiler_with_stack": False}
    args = ALL | {"profiler_config": profiler}
    async with started(VllmEngine, EngineConfig(model=str(cut_model_dir), served_name="m", args=args), SUPPORT, means) as made:
        yield made


class TestPlain(GeneratingContract, OptionsContract, CachingContract, GeneratingOperationsContract, HealthContract):
    """An engine as it starts by default, which declares less."""

    @pytest.fixture
    def subject(self, plain: Subject) -> Subject:
        return plain


class TestEverything(
    GeneratingContract, SamplingContract, OptionsContract, CachingContract, GeneratingOperationsContract, HealthContract
):
    """An engine with all that the bundled model can have."""

    @pytest.fixture
    def subject(self, rich: Subject) -> Subject:
        return rich


async def test_these_settings_show_every_ability_that_vllm_declares(plain: Subject, rich: Subject) -> None:
    assert plain.declared | rich.declared | SUPPORT.untried.keys() == SUPPORT.words
    assert not (plain.declared | rich.declared) & SUPPORT.untried.keys()


class TestEnd(KilledContract):
    """The last ones: the core of the second engine is killed."""

    @pytest.fixture
    def before(self, rich: Subject) -> set[int]:
        assert isinstance(rich.engine, VllmEngine)
        return descendants(os.getpid()) - set(rich.engine._processes.alive())

    @pytest.fixture
    def subject(self, rich: Subject) -> Subject:
        return rich
