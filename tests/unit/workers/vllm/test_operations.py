"""The operations of a started vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.workers.vllm.convert import VllmOperations


class Vllm:
    """Notes how its prefix cache is reset."""

    def __init__(self, connector: str | None, *, busy: bool = False) -> None:
        transfer = SimpleNamespace(kv_connector=connector) if connector else None
        self.vllm_config = SimpleNamespace(
            profiler_config=SimpleNamespace(profiler=None),
            kv_transfer_config=transfer,
            model_config=SimpleNamespace(enable_sleep_mode=False),
            lora_config=None,
        )
        self.resets: list[dict[str, Any]] = []
        self._busy = busy

    async def reset_prefix_cache(self, **args: Any) -> bool:
        self.resets.append(args)
        return not self._busy


@pytest.mark.parametrize(
    ("connector", "args", "expected"),
    [
        (None, {}, [{}]),
        ("NixlConnector", {}, [{}]),  # blocks that are on offer stay
        ("OffloadingConnector", {}, [{}, {"reset_connector": True}]),
        ("OffloadingConnector", {"reset_connector": False}, [{"reset_connector": False}]),
    ],
)
async def test_a_reset_cache_is_empty_on_the_host_too(
    connector: str | None, args: dict[str, Any], expected: list[dict[str, Any]]
) -> None:
    llm = Vllm(connector)
    assert await VllmOperations(llm, cpu=True).do("reset_prefix_cache", args) == {"result": True}
    assert llm.resets == expected


async def test_a_cache_in_use_keeps_its_host_tier() -> None:
    llm = Vllm("OffloadingConnector", busy=True)
    assert await VllmOperations(llm, cpu=True).do("reset_prefix_cache", {}) == {"result": False}
    assert llm.resets == [{}]
