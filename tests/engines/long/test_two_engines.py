"""One deployment serves the same model on a real vLLM and on a real SGLang, as two pools: each name answers with the tokens of
its own engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engines.conftest import ARGS, DIRECT_TOKENS, QUESTIONS
from tests.engines.support.sglang_args import ARGS as SGLANG_ARGS
from tests.engines.support.sglang_args import needs_sglang
from tests.faults.test_workers_come_and_go import holders
from tests.support.up_process import RunningUp

pytestmark = [needs_sglang, pytest.mark.engine, pytest.mark.long_engine, pytest.mark.timeout(1200)]

START_S = 600.0


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, direct: list[list[int]], direct_sglang: list[list[int]]
) -> Iterator[RunningUp]:
    """Depends on what the engines say alone only so that no third engine is up at the same time."""
    flags = [f for name, value in ARGS.items() for f in ("--engine-arg", f"{name}={value}")]
    pool = {"engine": "sglang", "engine_args": SGLANG_ARGS}
    flags += ["--served-name", "small", "--pool", f"small-sglang={json.dumps(pool)}"]
    up = RunningUp(tmp_path_factory.mktemp("both"), "--model", str(model_dir), *flags, engine="vllm")
    try:
        up.until("ready", lambda: up.state()["ready"], START_S)
        up.until("both workers joined", lambda: len(holders(up)) == 2, START_S)
        yield up
        up.process.terminate()
        assert up.process.wait(60) == 0, up.log()
    finally:
        up.stop()


def test_each_pool_answers_with_the_tokens_of_its_own_engine(
    both: RunningUp, direct: list[list[int]], direct_sglang: list[list[int]], tokenizer: Any
) -> None:
    with openai.OpenAI(base_url=f"{both.state()['url']}/v1", api_key="none", max_retries=0, timeout=120) as api:
        assert {model.id for model in api.models.list()} >= {"small", "small-sglang"}
        for model, expected in (("small", direct), ("small-sglang", direct_sglang)):
            for question, tokens in zip(QUESTIONS, expected, strict=True):
                answer = api.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": question}], max_tokens=DIRECT_TOKENS, temperature=0
                )
                assert answer.model == model
                assert answer.choices[0].message.content == tokenizer.decode(tokens)
    ready = {event["engine"] for event in both.events("worker.ready")}
    assert ready == {"vllm", "sglang"}
