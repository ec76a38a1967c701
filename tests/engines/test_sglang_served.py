"""Two real SGLang workers under `headrace up`: the engine's own text, prompts routed by their cached beginning, and kills.

The tests run in their order: the last one takes the workers from those that come before.
"""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engine_contract.life import descendants
from tests.engines.conftest import DIRECT_TOKENS, QUESTIONS
from tests.engines.support.killed_streams import GUIDED, KINDS, PENALIZED, SLOTS, Requests, lives, must_go_on, undisturbed
from tests.engines.support.prefix_routing import must_follow_the_cache
from tests.engines.support.sglang_args import ARGS, needs_sglang
from tests.engines.support.sglang_processes import scheduler_of
from tests.faults.test_workers_come_and_go import holders
from tests.support.up_process import RunningUp

pytestmark = [needs_sglang, pytest.mark.engine, pytest.mark.timeout(1800)]

REQUESTS = Requests(continued=(*KINDS, *PENALIZED), refused=GUIDED)
START_S = 600.0


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, direct_sglang: list[list[int]]) -> Iterator[RunningUp]:
    """Depends on `direct_sglang` only so that no third engine is up at the same time."""
    args = {**ARGS, "max_running_requests": SLOTS}
    flags = [f for name, value in args.items() for f in ("--engine-arg", f"{name}={value}")]
    flags += ["--workers", "2", "--metrics-port", "0", "--tool-parser", "hermes"]
    named = ("--model", str(model_dir), "--served-name", "small")
    up = RunningUp(tmp_path_factory.mktemp("two"), *named, *flags, engine="sglang")
    try:
        up.until("ready", lambda: up.state()["ready"], START_S)
        up.until("both workers joined", lambda: len(holders(up)) == 2, START_S)
        up.until("the router works", lambda: bool(up.events("router.ready")))
        yield up
        left = [pid for one in up.pids() for pid in descendants(one)]
        up.process.terminate()
        assert up.process.wait(60) == 0, up.log()
        assert not [pid for pid in left if lives(pid)]
    finally:
        up.stop()


def test_prompts_go_to_the_worker_whose_cache_has_their_beginning(two: RunningUp) -> None:
    must_follow_the_cache(two)


def test_the_text_is_that_of_the_engine_alone(two: RunningUp, direct_sglang: list[list[int]], tokenizer: Any) -> None:
    with openai.OpenAI(base_url=f"{two.state()['url']}/v1", api_key="none", max_retries=0, timeout=120) as api:
        for question, tokens in zip(QUESTIONS, direct_sglang, strict=True):
            answer = api.chat.completions.create(
                model="small", messages=[{"role": "user", "content": question}], max_tokens=DIRECT_TOKENS, temperature=0
            )
            assert answer.choices[0].message.content == tokenizer.decode(tokens)


def test_sglangs_own_metrics_are_among_those_of_each_worker(two: RunningUp) -> None:
    for worker in two.state()["workers"]:
        with urllib.request.urlopen(f"http://127.0.0.1:{worker['metrics_port']}/metrics", timeout=10) as answer:
            told = answer.read().decode()
        values = {line.split("{")[0]: float(line.split()[-1]) for line in told.splitlines() if line.startswith("sglang:")}
        assert values["sglang:prompt_tokens_total"] > 0, "it has computed prompts"
        assert values["sglang:num_running_reqs"] == 0
        assert "headrace_worker_ready 1.0" in told


def kill_engine(worker: int) -> list[int]:
    """Kill what computes, as a lack of memory would; SGLang then ends itself, and the worker has to follow."""
    processes, scheduler = [worker, *descendants(worker)], scheduler_of(worker)
    os.kill(scheduler, signal.SIGKILL)
    return processes


def kill_worker(worker: int) -> list[int]:
    """Kill the worker alone; whatever belongs to it has to follow."""
    processes = [worker, *descendants(worker)]
    os.kill(worker, signal.SIGKILL)
    return processes


def worker_pids(up: RunningUp) -> set[int]:
    return {pid for pid, _ in holders(up).values()}


@pytest.mark.fault
async def test_streams_go_on_when_the_engine_is_killed_and_when_its_worker_is(two: RunningUp) -> None:
    async with openai.AsyncOpenAI(base_url=f"{two.state()['url']}/v1", api_key="none", max_retries=0, timeout=200) as api:
        expected = await undisturbed(api, REQUESTS.continued)
        before = await asyncio.to_thread(worker_pids, two)
        await must_go_on(two, api, REQUESTS, expected, kill_engine)
        replaced = partial(two.until, "the ended worker is replaced", lambda: len(worker_pids(two)) == 2, START_S)
        await asyncio.to_thread(replaced)
        assert len(before & await asyncio.to_thread(worker_pids, two)) == 1
        await must_go_on(two, api, REQUESTS, expected, kill_worker)
