"""The death of vLLM's engine core is declared once, whoever notices it."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType

import pytest

from headrace.workers.errors import EngineDead, EngineOverloaded, RequestInvalid
from headrace.workers.vllm.core_death import CORE_GONE, CoreDeath


class EngineDeadError(Exception):
    """Stands for vLLM's error of the same name."""


class GracefulHTTPError(Exception):
    """Stands for vLLM's error of the same name."""


class VLLMClientError(ValueError):
    """Stands for vLLM's error of the same name."""


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a stand-in of vLLM's exceptions in the place of the package."""
    exceptions, dead = ModuleType("vllm.exceptions"), ModuleType("vllm.v1.engine.exceptions")
    exceptions.GracefulHTTPError = GracefulHTTPError  # type: ignore[attr-defined]
    exceptions.VLLMClientError = VLLMClientError  # type: ignore[attr-defined]
    dead.EngineDeadError = EngineDeadError  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.exceptions", exceptions)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.exceptions", dead)


async def test_the_first_reason_counts_and_is_told_once() -> None:
    told: list[str] = []
    death = CoreDeath(told.append)
    assert death.reason is None
    death.declare("out of memory")
    death.declare()
    assert (death.reason, told) == ("out of memory", ["out of memory"])
    assert await asyncio.wait_for(death.wait(lambda: False), 1) == "out of memory"


async def test_the_death_of_an_idle_core_is_found_by_asking() -> None:
    told: list[str] = []
    assert await asyncio.wait_for(CoreDeath(told.append).wait(lambda: True), 2) == CORE_GONE
    assert told == [CORE_GONE]


async def test_a_declared_death_wakes_those_that_wait() -> None:
    death = CoreDeath(lambda _: None)
    waiting = asyncio.create_task(death.wait(lambda: False))
    await asyncio.sleep(0)
    death.declare("killed")
    assert await asyncio.wait_for(waiting, 1) == "killed"


@pytest.mark.usefixtures("vllm")
async def test_an_error_that_means_death_declares_it() -> None:
    told: list[str] = []
    death = CoreDeath(told.append)
    assert isinstance(death.translate(EngineDeadError("core")), EngineDead)
    assert told == [CORE_GONE]


@pytest.mark.usefixtures("vllm")
async def test_a_full_engine_is_overloaded_and_other_errors_stay_what_they_are() -> None:
    death = CoreDeath(lambda _: None)
    overloaded = death.translate(GracefulHTTPError("too many"))
    assert isinstance(overloaded, EngineOverloaded)
    assert "too many" in str(overloaded)
    assert isinstance(death.translate(VLLMClientError("too long")), RequestInvalid)
    other = OSError("disk")
    assert death.translate(other) is other
    assert death.reason is None
