"""The engine contract, with the engine of examples/: what an engine with hardly an ability must still do, and must refuse."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from examples.echo_engine import EchoEngine
from headrace.workers.engine import EngineConfig
from headrace.workers.kit import EngineSupport, words
from tests.engine_contract.caching import CachingContract
from tests.engine_contract.generating import GeneratingContract
from tests.engine_contract.life import HealthContract, StoppedContract, descendants
from tests.engine_contract.operations import GeneratingOperationsContract
from tests.engine_contract.options import OptionsContract
from tests.engine_contract.subject import Means, Subject, started

SUPPORT = EngineSupport(
    name="echo_engine:EchoEngine", title="echo", words=words(EchoEngine.capabilities, ("chat", "completion"))
)


@pytest_asyncio.fixture
async def subject() -> AsyncIterator[Subject]:
    config = EngineConfig(model="echo", served_name="echo")
    async with started(EchoEngine, config, SUPPORT, Means(end_s=10.0)) as made:
        yield made


class TestEcho(GeneratingContract, OptionsContract, CachingContract, GeneratingOperationsContract, HealthContract):
    """One engine per test: it starts at once."""


class TestEnd(StoppedContract):
    """A stop; nothing can kill it."""

    @pytest.fixture
    def before(self) -> set[int]:
        return descendants(os.getpid())


async def test_it_shows_every_ability_that_it_declares(subject: Subject) -> None:
    assert subject.declared == SUPPORT.words
