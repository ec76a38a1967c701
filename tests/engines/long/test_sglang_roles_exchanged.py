"""Two real SGLang workers that exchange their roles: each computes prompts for the other one, and the tokens are those of one
SGLang alone both times. An SGLang keeps the role that it was started for, so both are started again, under their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engines.conftest import DIRECT_TOKENS, QUESTIONS
from tests.engines.support.sglang_args import ARGS, needs_sglang
from tests.engines.support.worker_process import WorkerProcess
from tests.support.handovers import no_block_is_kept, workers
from tests.support.up_process import RunningUp

pytestmark = [needs_sglang, pytest.mark.engine, pytest.mark.long_engine, pytest.mark.timeout(900)]

START_S = 400.0
MODEL = "small"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, direct_sglang: list[list[int]]) -> Iterator[RunningUp]:
    """A deployment without workers. Depends on `direct_sglang` only so that no third engine is up at the same time."""
    running = RunningUp(tmp_path_factory.mktemp("exchanged"), "--workers", "0", "--prefill", "always")
    try:
        running.until("it takes requests", lambda: bool(running.events("frontend.listening")))
        yield running
    finally:
        running.stop()


@contextmanager
def two(up: RunningUp, folder: Path, model_dir: Path, *, prefill: str, decode: str) -> Iterator[WorkerProcess]:
    """Workers of these names; gives the one that answers. Both are gone at the end, and have drained."""
    folder.mkdir()
    common = ("--engine", "sglang", "--prefill", "always", "--log-level", "debug", "--data-dir", str(up.run_file.parents[1]))
    with ExitStack() as stack:
        started = {
            role: stack.enter_context(
                WorkerProcess(
                    name, folder, up.state()["nats"]["url"], model_dir, served=MODEL, flags=(*common, "--role", role), **ARGS
                )
            )
            for name, role in ((prefill, "prefill"), (decode, "decode"))
        }
        for worker in started.values():
            worker.until("it is ready", lambda: {prefill, decode} == set(workers(up)), START_S)
        up.until("the router works", lambda: bool(up.events("router.ready")))
        assert {name: member.role for name, member in workers(up).items()} == {prefill: "prefill", decode: "decode"}
        yield started["decode"]


def must_be_computed_by(other: str, up: RunningUp, here: WorkerProcess, expected: list[str]) -> None:
    """Ask each question, and compare text, and the tokens that have come from the other worker's cache."""
    with openai.OpenAI(base_url=f"{up.state()['url']}/v1", api_key="none", max_retries=0, timeout=120) as api:
        answers = [
            api.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": question}], max_tokens=DIRECT_TOKENS, temperature=0
            )
            for question in QUESTIONS
        ]
    assert [answer.choices[0].message.content for answer in answers] == expected
    handed_over = here.events("prefill.handed_over")
    assert [event["by"].rpartition("-")[0] for event in handed_over] == [other] * len(QUESTIONS)
    asked = [answer.usage.prompt_tokens for answer in answers if answer.usage is not None]
    cached = [_cached(answer) for answer in answers]
    assert [event["tokens"] for event in handed_over] == [tokens - kept for tokens, kept in zip(asked, cached, strict=True)]
    assert cached[0] == 0, "the first prompt has come whole"
    assert here.events("prefill.failed") == []
    no_block_is_kept(up, 2)


def _cached(answer: Any) -> int:
    details = answer.usage.prompt_tokens_details
    return int(details.cached_tokens or 0) if details is not None else 0


def test_each_of_two_workers_computes_prompts_for_the_other_one(
    up: RunningUp, tmp_path: Path, model_dir: Path, direct_sglang: list[list[int]], tokenizer: Any
) -> None:
    expected = [tokenizer.decode(tokens) for tokens in direct_sglang]
    with two(up, tmp_path / "first", model_dir, prefill="a", decode="b") as b:
        must_be_computed_by("a", up, b, expected)
    up.until("both are gone", lambda: not workers(up))
    with two(up, tmp_path / "second", model_dir, prefill="b", decode="a") as a:
        must_be_computed_by("b", up, a, expected)
