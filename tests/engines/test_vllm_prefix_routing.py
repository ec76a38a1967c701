"""Two real vLLM workers under a router: prompts go where their beginning is cached."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.conftest import ARGS
from tests.engines.support.prefix_routing import must_follow_the_cache
from tests.faults.test_workers_come_and_go import holders
from tests.support.up_process import RunningUp

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

ENGINES_START_S = 300.0


def test_prompts_go_to_the_worker_whose_cache_has_their_beginning(tmp_path: Path, model_dir: Path) -> None:
    flags = [f for name, value in ARGS.items() for f in ("--engine-arg", f"{name}={value}")]
    named = ("--workers", "2", "--model", str(model_dir), "--served-name", "small")
    up = RunningUp(tmp_path, *named, *flags, engine="vllm")
    try:
        up.until("ready", lambda: up.state()["ready"], ENGINES_START_S)
        up.until("both workers joined", lambda: len(holders(up)) == 2, ENGINES_START_S)
        up.until("the router works", lambda: bool(up.events("router.ready")))
        must_follow_the_cache(up)
        up.process.terminate()
        assert up.process.wait(60) == 0, up.log()
    finally:
        up.stop()
