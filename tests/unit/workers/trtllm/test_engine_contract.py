"""The engine contract, with TensorRT-LLM's adapter on the stand-in for its package, in both of its lines."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.workers.engine import Engine, EngineConfig, Role
from headrace.workers.trtllm.engine import SUPPORT, TrtllmEngine
from tests.engine_contract.caching import CachingContract
from tests.engine_contract.generating import GeneratingContract
from tests.engine_contract.handover import HandoverContract, Pair
from tests.engine_contract.life import HealthContract, KilledContract, StoppedContract, descendants
from tests.engine_contract.operations import GeneratingOperationsContract
from tests.engine_contract.options import OptionsContract
from tests.engine_contract.subject import Means, Subject, started
from tests.support import tensorrt_llm_stand_in as stand_in
from tests.unit.workers.trtllm.engine_bench import shared_model

pytestmark = pytest.mark.slow  # together: a process of tests takes a minute for them

ARGS: dict[str, Any] = {"max_batch_size": 8, "max_seq_len": 1024}
BLOCKS = 64
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "1.2": (stand_in.V1_2, {}),
    "1.3 with adapters": (stand_in.V1_3, {"lora_config": {"max_lora_rank": 8}}),
}


async def kill(engine: Engine) -> None:
    assert isinstance(engine, TrtllmEngine)
    assert engine._started is not None
    engine._started.llm.shutdown()  # as it does by itself when one of its processes fails


def config(role: Role = Role.AGGREGATED, *, options: dict[str, Any] | None = None, **args: Any) -> EngineConfig:
    return EngineConfig(
        model=str(shared_model()),
        served_name="m",
        role=role,
        args=ARGS | {"model_kwargs": {"stand_in": {"blocks": BLOCKS} | (options or {})}, **args},
    )


def means(folder: Path, version: str = stand_in.V1_3) -> Means:
    adapters = tuple(str(stand_in.adapter_folder(folder / name)) for name in ("one", "other"))
    return Means(
        adapters=adapters,
        kill=kill,
        end_s=10.0,
        events_have_salts=version != stand_in.V1_2,
        computes_penalties=False,
        offers_are_counted=False,  # there are statistics of steps only
    )


@pytest_asyncio.fixture(params=sorted(SETTINGS))
async def subject(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    version, args = SETTINGS[request.param]
    timed = "load" in request.node.name or "priority" in request.node.name  # else answers end before they are looked at
    options = {"timing": "h100-8b"} if timed else {}
    with stand_in.installed(version):
        made_by = config(options=options, **args)
        async with started(TrtllmEngine, made_by, SUPPORT, means(tmp_path, version)) as made:
            yield made


class TestStandIn(GeneratingContract, OptionsContract, CachingContract, GeneratingOperationsContract, HealthContract):
    """One engine per test: the stand-in starts at once."""


class TestHandover(HandoverContract):
    """A context side and a generation side."""

    @pytest_asyncio.fixture(params=stand_in.VERSIONS)
    async def pair(self, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
        transceiver: dict[str, Any] = {"cache_transceiver_config": {"backend": "UCX"}, "disable_overlap_scheduler": True}
        with stand_in.installed(request.param):
            async with AsyncExitStack() as stack:
                sides = [
                    await stack.enter_async_context(
                        started(TrtllmEngine, config(role, **transceiver), SUPPORT, means(tmp_path))
                    )
                    for role in (Role.PREFILL, Role.DECODE)
                ]
                yield Pair(prefill=sides[0], decode=sides[1])


class TestEnd(KilledContract, StoppedContract):
    """Deaths and stops."""

    @pytest.fixture
    def before(self) -> set[int]:
        return descendants(os.getpid())

    @pytest_asyncio.fixture
    async def subject(self, tmp_path: Path, before: set[int]) -> AsyncIterator[Subject]:
        slow = config(options={"timing": "cpu-small"})
        with stand_in.installed():
            async with started(TrtllmEngine, slow, SUPPORT, means(tmp_path)) as made:
                yield made


async def test_these_settings_show_every_ability_that_the_adapter_declares(tmp_path: Path) -> None:
    shown = frozenset(SUPPORT.untried)
    for args in ({"lora_config": {"max_lora_rank": 8}}, {"cache_transceiver_config": {}, "disable_overlap_scheduler": True}):
        with stand_in.installed():
            async with started(TrtllmEngine, config(**args), SUPPORT, means(tmp_path)) as made:
                shown |= made.declared
    assert shown == SUPPORT.words
