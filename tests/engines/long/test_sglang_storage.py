"""Storage behind SGLang's hierarchical cache, with a real SGLang: what device and host have dropped is read back from files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.workers.engine import EngineConfig
from headrace.workers.sglang.engine import SUPPORT, SglangEngine
from tests.engine_contract.subject import Means, Subject, emitted, greedy, started
from tests.engines.support.sglang_args import ARGS, BLOCK, needs_sglang
from tests.engines.test_sglang_kv_events import HOST_TIER

pytestmark = [
    needs_sglang,
    pytest.mark.engine,
    pytest.mark.long_engine,
    pytest.mark.timeout(700),
    pytest.mark.filterwarnings("default"),  # SGLang and torch warn about themselves
]

PAGES = 20
STORED_S = 30.0
POSIX = {"plugin": {"posix": {"active": True}}, "use_direct_io": False}
BACK_ENDS: dict[str, dict[str, Any]] = {
    "file": {},
    "nixl": {"hicache_storage_backend_extra_config": json.dumps(POSIX)},
}


@pytest_asyncio.fixture(params=sorted(BACK_ENDS))
async def stored(
    request: pytest.FixtureRequest, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Subject, Path]]:
    """An engine, and the folder of its storage."""
    folder = tmp_path / "pages"
    folder.mkdir()
    for name in ("FILE", "NIXL"):
        monkeypatch.setenv(f"SGLANG_HICACHE_{name}_BACKEND_STORAGE_DIR", str(folder))
    storage = {"hicache_storage_backend": request.param, "hicache_storage_prefetch_policy": "wait_complete"}
    args = ARGS | HOST_TIER | storage | BACK_ENDS[request.param]
    config = EngineConfig(model=str(model_dir), served_name="small", args=args)
    async with started(SglangEngine, config, SUPPORT, Means(start_s=420.0)) as subject:
        yield subject, folder


async def test_a_prompt_that_device_and_host_have_dropped_is_read_from_storage(stored: tuple[Subject, Path]) -> None:
    subject, folder = stored
    prompt = subject.prompt(1, PAGES + 0.2)
    cold = await subject.run(prompt, greedy(8))
    async with asyncio.timeout(STORED_S):
        while sum(path.is_file() and path.stat().st_size > 0 for path in folder.rglob("*")) < PAGES:
            await asyncio.sleep(0.05)
    assert (await subject.engine.control("reset_prefix_cache", {})) == {"result": True}
    warm = await subject.run(prompt, greedy(8))
    assert (cold[0].cached_tokens, warm[0].cached_tokens) == (0, PAGES * BLOCK)
    assert emitted(warm) == emitted(cold)
