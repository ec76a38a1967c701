"""Two real SGLang workers under `headrace up`: the engine's own text, and prompts routed by their cached beginning."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engine_contract.life import descendants
from tests.engines.conftest import DIRECT_TOKENS, QUESTIONS, ROOT
from tests.engines.support.prefix_routing import must_follow_the_cache
from tests.engines.support.sglang_args import ARGS, needs_sglang
from tests.engines.test_vllm_killed_mid_stream import lives
from tests.faults.test_workers_come_and_go import holders
from tests.support.running_up import RunningUp

pytestmark = [needs_sglang, pytest.mark.engine, pytest.mark.timeout(900)]

START_S = 450.0


@pytest.fixture(scope="module")
def alone(model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What SGLang's own offline API answers to each prompt at temperature 0."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.support.direct_sglang"],
        input=json.dumps({"model": str(model_dir), "args": ARGS, "prompts": prompts, "max_tokens": DIRECT_TOKENS}),
        capture_output=True,
        text=True,
        timeout=START_S,
        cwd=ROOT,
        check=False,
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("answers ")]
    assert told, done.stderr[-2000:]
    answers: list[list[int]] = json.loads(told[0].removeprefix("answers "))
    return answers


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, alone: list[list[int]]) -> Iterator[RunningUp]:
    """Depends on `alone` only so that no third engine is up at the same time."""
    flags = [f for name, value in ARGS.items() for f in ("--engine-arg", f"{name}={value}")]
    named = ("--workers", "2", "--model", str(model_dir), "--served-name", "small")
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


def test_the_text_is_that_of_the_engine_alone(two: RunningUp, alone: list[list[int]], tokenizer: Any) -> None:
    with openai.OpenAI(base_url=f"{two.state()['url']}/v1", api_key="none", max_retries=0, timeout=120) as api:
        for question, tokens in zip(QUESTIONS, alone, strict=True):
            answer = api.chat.completions.create(
                model="small", messages=[{"role": "user", "content": question}], max_tokens=DIRECT_TOKENS, temperature=0
            )
            assert answer.choices[0].message.content == tokenizer.decode(tokens)
