"""The engine contract, with the adapter for vLLM-Omni on the stand-in for its package, whose text stage is a real vLLM."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.workers.engine import Engine, EngineConfig, Role
from headrace.workers.engine_registry import MEMBERS, create
from headrace.workers.errors import EngineStartFailed, UnsupportedByEngine
from headrace.workers.omni import SUPPORT, OmniEngine
from tests.engine_contract.generating import GeneratingContract
from tests.engine_contract.life import HealthContract, KilledContract, descendants
from tests.engine_contract.options import OptionsContract
from tests.engine_contract.subject import Means, Subject, greedy, started
from tests.support import vllm_omni_stand_in as stand_in

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long_engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM and torch warn about themselves
]

ARGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "kv_cache_memory_bytes": 48 << 20,
    "max_num_seqs": 4,
    "block_size": 32,
    "enforce_eager": True,
    "enable_prefix_caching": True,
}


async def kill(engine: Engine) -> None:
    """Kill the processes of the stages, as a lack of memory would."""
    assert isinstance(engine, OmniEngine)
    stages = engine._processes.alive()
    assert stages
    for pid in stages:
        os.kill(pid, signal.SIGKILL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def omni(model_dir: Path) -> AsyncIterator[Subject]:
    with stand_in.installed():
        config = EngineConfig(model=str(model_dir), served_name="m", args=ARGS)
        async with started(OmniEngine, config, SUPPORT, Means(kill=kill, start_s=240.0)) as made:
            yield made


async def test_it_is_loaded_by_its_path_and_has_all_that_an_engine_has() -> None:
    engine = create("headrace.workers.omni:OmniEngine")
    assert all(hasattr(engine, name) for name in MEMBERS)


class TestText(GeneratingContract, OptionsContract, HealthContract):
    """The stage that writes text."""

    @pytest.fixture
    def subject(self, omni: Subject) -> Subject:
        return omni


async def test_only_text_is_asked_of_the_stages(omni: Subject) -> None:
    assert isinstance(omni.engine, OmniEngine)
    assert omni.engine._started is not None
    await omni.ids(omni.prompt(5), greedy(2))
    asked = omni.engine._started.omni.asked
    assert asked
    assert all(request["output_modalities"] == ["text"] for request in asked)
    assert omni.info.extra == {"stages": ["text", "audio"]}


async def test_it_hands_nothing_over(omni: Subject) -> None:
    with pytest.raises(UnsupportedByEngine, match="hands nothing over"):
        await omni.engine.set_role(Role.PREFILL)


@pytest.mark.parametrize("name", ["model", "output_modalities"])
async def test_settings_that_belong_elsewhere_are_refused_before_anything_starts(model_dir: Path, name: str) -> None:
    config = EngineConfig(model=str(model_dir), served_name="m", args={name: "x"})
    with stand_in.installed(), pytest.raises(EngineStartFailed, match=name):
        await OmniEngine().start(config, lambda outputs: None)


async def test_without_the_package_the_start_says_what_is_missing(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_omni", None)
    with pytest.raises(EngineStartFailed, match="pip install vllm-omni"):
        await OmniEngine().start(EngineConfig(model=str(model_dir), served_name="m"), lambda outputs: None)


class TestEnd(KilledContract):
    """The last one: the stages are killed."""

    @pytest.fixture
    def before(self, omni: Subject) -> set[int]:
        assert isinstance(omni.engine, OmniEngine)
        return descendants(os.getpid()) - set(omni.engine._processes.alive())

    @pytest.fixture
    def subject(self, omni: Subject) -> Subject:
        return omni
