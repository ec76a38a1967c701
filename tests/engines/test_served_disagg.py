"""The whole with prefill and decode apart, on a real model: the same tokens as vLLM alone gives, and roles that are swapped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engines.conftest import ARGS, DIRECT_TOKENS, QUESTIONS
from tests.support.handovers import handed_over, must_be_handed_over
from tests.support.listening_sockets import LOOPBACK, descendants, listening
from tests.support.up_process import RunningUp

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

ENGINES_START_S = 240.0


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, direct: list[list[int]]) -> Iterator[RunningUp]:
    """Depends on `direct` only so that no third engine is up at the same time."""
    flags = [f for name, value in ARGS.items() for f in ("--engine-arg", f"{name}={value}")]
    flags += ["--mode", "disagg", "--prefill", "always", "--log-level", "debug", "--served-name", "small"]
    up = RunningUp(tmp_path_factory.mktemp("apart"), "--model", str(model_dir), *flags, engine="vllm")
    try:
        up.until("the engines have met", lambda: bool(up.events("peer.met")), ENGINES_START_S)
        yield up
        up.process.terminate()
        assert up.process.wait(60) == 0, up.log()
    finally:
        up.stop()


def must_answer_like_vllm_alone(up: RunningUp, expected: list[list[int]], tokenizer: Any) -> None:
    with openai.OpenAI(base_url=f"{up.state()['url']}/v1", api_key="none", max_retries=0, timeout=120) as api:
        for question, tokens in zip(QUESTIONS, expected, strict=True):
            answer = api.chat.completions.create(
                model="small", messages=[{"role": "user", "content": question}], max_tokens=DIRECT_TOKENS, temperature=0
            )
            assert answer.choices[0].message.content == tokenizer.decode(tokens)


def headrace(up: RunningUp, *words: str) -> None:
    environment = {**os.environ, **up.environment()}
    command = [sys.executable, "-P", "-m", "headrace", *words]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)


def test_no_socket_of_any_part_or_engine_can_be_reached_from_other_machines(apart: RunningUp) -> None:
    """NATS, HTTP, probes, ZeroMQ, PyTorch's stores and groups, NIXL's and UCX's: each listening socket of each process."""
    assert listening(descendants(set(apart.pids()))) == LOOPBACK


def test_prompts_computed_elsewhere_give_the_same_tokens_and_roles_can_be_swapped(
    apart: RunningUp, direct: list[list[int]], tokenizer: Any
) -> None:
    must_answer_like_vllm_alone(apart, direct, tokenizer)
    must_be_handed_over(apart, ["prefill-1"] * len(QUESTIONS))
    headrace(apart, "worker", "role", "prefill-1", "decode")
    headrace(apart, "worker", "role", "decode-1", "prefill")
    apart.until("they have met the other way round", lambda: len(apart.events("peer.met")) >= 2, 60)
    headrace(apart, "worker", "status")
    before = len(handed_over(apart))
    with openai.OpenAI(base_url=f"{apart.state()['url']}/v1", api_key="none", max_retries=0, timeout=120) as api:
        api.completions.create(model="small", prompt=list(range(1000, 1200)), max_tokens=4)
    must_answer_like_vllm_alone(apart, direct, tokenizer)
    apart.until("the other way round is logged", lambda: handed_over(apart)[before:][:1] == ["decode-1"])
    assert apart.events("prefill.failed") == []
