"""The engine contract, with the simulator: as it starts by default, handing over both ways, and pooling."""

from __future__ import annotations

import os
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.workers.engine import Engine, EngineConfig, EngineInfo, Role, StoredTensor
from headrace.workers.sim.engine import SUPPORT, SimEngine
from headrace.workers.sim.fabric import LocalFabric
from tests.engine_contract.caching import CachingContract
from tests.engine_contract.generating import GeneratingContract
from tests.engine_contract.handover import HandoverContract, Pair
from tests.engine_contract.life import HealthContract, KilledContract, StoppedContract, descendants
from tests.engine_contract.operations import GeneratingOperationsContract
from tests.engine_contract.options import OptionsContract
from tests.engine_contract.pooling import PoolingContract
from tests.engine_contract.subject import Means, MediaPrompt, Subject, started

ARGS = {"slots": 8, "blocks": 64, "block_size": 16, "context_length": 1024, "adapters": ["first"]}
PAIR = {"fabric": "local", "room_timeout_s": 0.3, "slots": 8, "blocks": 64, "block_size": 16, "context_length": 1024}
POOLING = {"embed": "embedding", "score": "score", "classify": "classify"}


def media(info: EngineInfo, kind: str, number: int) -> MediaPrompt:
    slot = info.media[kind]
    prompt = [*range(200, 210), *[slot.token] * slot.tokens, *range(300, 340)]
    return prompt, [{"kind": kind, "digest": number, "start": 10, "length": slot.tokens}]


def embeds(tokens: list[int]) -> StoredTensor:
    return StoredTensor("float32", (len(tokens), 1), memoryview(struct.pack(f"<{len(tokens)}f", *tokens)))


async def kill(engine: Engine) -> None:
    assert isinstance(engine, SimEngine)
    engine._die("killed by a test")
    assert engine._task is not None
    engine._task.cancel()


MEANS = Means(adapters=("here", "there"), media=media, embeds=embeds, embeds_are_tokens=False, kill=kill, end_s=10.0)


def config(role: Role = Role.AGGREGATED, **args: Any) -> EngineConfig:
    return EngineConfig(model="sim", served_name="sim", role=role, args=args)


@pytest_asyncio.fixture
async def subject(tmp_path: Path) -> AsyncIterator[Subject]:
    async with started(SimEngine, config(**ARGS, profile_dir=str(tmp_path)), SUPPORT, MEANS) as made:
        yield made


class TestSimulator(GeneratingContract, OptionsContract, CachingContract, GeneratingOperationsContract, HealthContract):
    """The simulator as it starts by default, but small."""


class TestWithLittle(OptionsContract, GeneratingOperationsContract):
    """The simulator without what its settings can switch off."""

    @pytest_asyncio.fixture
    async def subject(self) -> AsyncIterator[Subject]:
        async with started(SimEngine, config(**ARGS | {"media_tokens": 0, "adapters": []}), SUPPORT, MEANS) as made:
            yield made


class TestPooling(PoolingContract):
    """The simulator with vectors."""

    @pytest_asyncio.fixture(params=sorted(POOLING))
    async def subject(self, request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
        async with started(SimEngine, config(pooling=request.param, context_length=512), SUPPORT, MEANS) as made:
            yield made


class TestHandover(HandoverContract):
    """Two simulators on one fabric."""

    @pytest_asyncio.fixture(params=["params push", "params pull", "rendezvous"])
    async def pair(self, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
        style, _, mode = request.param.partition(" ")
        args: Mapping[str, Any] = PAIR | {"disagg": style, **({"transfer_mode": mode} if mode else {})}
        fabric = LocalFabric()
        async with AsyncExitStack() as stack:
            sides = [
                await stack.enter_async_context(started(lambda: SimEngine(fabric=fabric), config(role, **args), SUPPORT, MEANS))
                for role in (Role.PREFILL, Role.DECODE)
            ]
            yield Pair(prefill=sides[0], decode=sides[1])


class TestHandingOver(GeneratingContract, GeneratingOperationsContract):
    """A simulator that could hand over serves everything else too."""

    @pytest_asyncio.fixture
    async def subject(self) -> AsyncIterator[Subject]:
        async with started(SimEngine, config(**PAIR | {"disagg": "params"}), SUPPORT, MEANS) as made:
            yield made


class TestEnd(KilledContract, StoppedContract):
    """Deaths and stops."""

    @pytest.fixture
    def before(self) -> set[int]:
        return descendants(os.getpid())

    @pytest_asyncio.fixture
    async def subject(self, before: set[int]) -> AsyncIterator[Subject]:
        async with started(SimEngine, config(**ARGS | {"timing": "cpu-small"}), SUPPORT, MEANS) as made:
            yield made


async def test_these_settings_show_every_ability_that_the_simulator_declares() -> None:
    given = [config(**ARGS, profile_dir="profiles")]
    given += [config(**PAIR | {"disagg": style}) for style in ("params", "rendezvous")]
    given += [config(pooling=pooling) for pooling in POOLING]
    shown: frozenset[str] = frozenset(SUPPORT.untried)
    for each in given:
        async with started(SimEngine, each, SUPPORT, MEANS) as made:
            shown |= made.declared
    assert shown == SUPPORT.words
