"""Two real vLLM workers under a router: prompts go where their beginning is cached; when one engine is killed under several
streams, each stream ends as it would have without that, and no process of the engine is left; and when a worker is drained
under a stream, that goes on at the other.

The tests run in their order: the second one kills a worker, which is replaced, and the last one drains one, which is not.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engine_contract.life import descendants
from tests.engines.conftest import ARGS
from tests.engines.served.test_operations_real import told
from tests.engines.support.killed_streams import GUIDED, KINDS, PENALIZED, SLOTS, Requests, must_go_on, undisturbed
from tests.engines.support.prefix_routing import must_follow_the_cache
from tests.faults.test_workers_come_and_go import holders
from tests.support.sim_streams import client_of
from tests.support.up_process import RunningUp

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

ENGINES_START_S = 300.0


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[RunningUp]:
    flags = [f for name, value in {**ARGS, "max_num_seqs": SLOTS}.items() for f in ("--engine-arg", f"{name}={value}")]
    named = ("--workers", "2", "--model", str(model_dir), "--served-name", "small", "--tool-parser", "hermes")
    up = RunningUp(tmp_path_factory.mktemp("two"), *named, *flags, engine="vllm")
    try:
        up.until("ready", lambda: up.state()["ready"], ENGINES_START_S)
        up.until("both workers joined", lambda: len(holders(up)) == 2, ENGINES_START_S)
        up.until("the router works", lambda: bool(up.events("router.ready")))
        yield up
        up.process.terminate()
        assert up.process.wait(60) == 0, up.log()
    finally:
        up.stop()


def kill_worker(pid: int) -> list[int]:
    processes = [pid, *descendants(pid)]
    os.kill(pid, signal.SIGKILL)
    return processes


def test_prompts_go_to_the_worker_whose_cache_has_their_beginning(two: RunningUp) -> None:
    must_follow_the_cache(two)


@pytest.mark.fault
async def test_streams_of_a_killed_engine_go_on_with_the_next_token_or_say_why_not(two: RunningUp) -> None:
    async with openai.AsyncOpenAI(base_url=f"{two.state()['url']}/v1", api_key="none", max_retries=0, timeout=200) as api:
        requests = Requests(continued=KINDS, refused=(*GUIDED, *PENALIZED))
        await must_go_on(two, api, requests, await undisturbed(api, KINDS), kill_worker)


def test_a_stream_of_a_worker_that_is_drained_goes_on_at_the_other(two: RunningUp) -> None:
    two.until("the killed worker is replaced", lambda: len(holders(two)) == 2, ENGINES_START_S)
    asked: dict[str, Any] = {"model": "small", "prompt": "The sea", "max_tokens": 200, "temperature": 0}
    with client_of(two) as api:
        undisturbed = api.completions.create(**asked, extra_body={"ignore_eos": True})
        text, drained = "", ""
        for chunk in api.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}):
            text += chunk.choices[0].text
            if not drained and len(text) > 40:
                (drained,) = [worker for worker, (_, runs) in holders(two).items() if runs]
                assert told(two, "drain", drained, "--grace", "0")
    assert drained
    assert text == undisturbed.choices[0].text
    two.until("it has left", lambda: drained not in holders(two), 60)
    (left,) = two.events("part.left")
    assert left["reason"] == "drained"
