"""Prefill and decode on two real SGLang engines under `headrace up --mode disagg`, over NIXL: the tokens of one engine alone,
and a side that is killed, or stands still, in the middle.

The tests run in their order: one stops a side for a while, and the last three take workers away.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engine_contract.life import descendants
from tests.engines.conftest import DIRECT_TOKENS, QUESTIONS
from tests.engines.support.killed_streams import lives
from tests.engines.support.prefix_routing import PREFIX_BLOCKS, ask
from tests.engines.support.sglang_args import ARGS, needs_sglang
from tests.engines.support.sglang_processes import scheduler_of
from tests.support.handovers import failures, handed_over, must_be_handed_over, no_block_is_kept, once_taken, workers
from tests.support.listening_sockets import LOOPBACK, listening
from tests.support.listening_sockets import descendants as all_of_them
from tests.support.up_process import RunningUp

pytestmark = [needs_sglang, pytest.mark.engine, pytest.mark.timeout(1200)]

START_S = 600.0
PROMPT_TOKENS = 900  # a second or more to compute
ANSWER = 60
DEADLINE_S = 8.0  # the worker of an engine that stands still gives it up after 30 s at the earliest
PAGES_BACK_S = 60.0  # SGLang keeps for 30 s what a dead prefill side might still write into


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, direct_sglang: list[list[int]]) -> Iterator[RunningUp]:
    """Depends on `direct_sglang` only so that no third engine is up at the same time."""
    flags = [f for name, value in ARGS.items() for f in ("--engine-arg", f"{name}={value}")]
    flags += ["--mode", "disagg", "--prefill", "always", "--log-level", "debug", "--served-name", "small"]
    up = RunningUp(tmp_path_factory.mktemp("apart"), "--model", str(model_dir), *flags, engine="sglang")
    try:
        up.until("ready", lambda: up.state()["ready"], START_S)
        up.until("both have joined", lambda: len(workers(up)) == 2, START_S)
        yield up
        left = [pid for one in up.pids() for pid in descendants(one)]
        up.process.terminate()
        assert up.process.wait(60) == 0, up.log()
        assert not [pid for pid in left if lives(pid)]
    finally:
        up.stop()


def test_no_socket_of_any_part_or_engine_can_be_reached_from_other_machines(apart: RunningUp) -> None:
    """NATS, HTTP, probes, ZeroMQ, PyTorch's stores and groups, NIXL's and UCX's: each listening socket of each process."""
    assert listening(all_of_them(set(apart.pids()))) == LOOPBACK


def test_prompts_computed_elsewhere_give_the_tokens_of_one_engine_alone(
    apart: RunningUp, direct_sglang: list[list[int]], tokenizer: Any
) -> None:
    with openai.OpenAI(base_url=f"{apart.state()['url']}/v1", api_key="none", max_retries=0, timeout=120) as api:
        for question, tokens in zip(QUESTIONS, direct_sglang, strict=True):
            answer = api.chat.completions.create(
                model="small", messages=[{"role": "user", "content": question}], max_tokens=DIRECT_TOKENS, temperature=0
            )
            assert answer.choices[0].message.content == tokenizer.decode(tokens)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == len(tokens)
    must_be_handed_over(apart, ["prefill-1"] * len(QUESTIONS))
    assert failures(apart) == []
    no_block_is_kept(apart, 2)


def test_the_decode_engine_keeps_what_it_was_handed_for_the_next_prompt(apart: RunningUp) -> None:
    """SGLang's decode engines cache nothing unless they are told to; the router knows what this one has by its events."""
    before, turns = len(handed_over(apart)), itertools.count(2)
    first = ask(apart, 0, turn=1)
    assert first.known[first.worker] == 0
    must_be_handed_over(apart, ["prefill-1"], after=before)

    def kept() -> int:
        return ask(apart, 0, turn=next(turns)).known[first.worker]

    apart.until("the blocks of the beginning are known", lambda: kept() == PREFIX_BLOCKS)
    no_block_is_kept(apart, 2)


class Stream:
    """One streamed completion in a thread of its own. `salt` keeps its blocks from those of the same prompt before."""

    def __init__(self, up: RunningUp, salt: str, *, deadline_s: float | None = None) -> None:
        self.url = f"{up.state()['url']}/v1"
        self.salt = salt
        self.options: dict[str, Any] = {"timeout": deadline_s} if deadline_s is not None else {}
        self.text = ""
        self.pieces = 0
        self.usage: tuple[int, int] = (0, 0)
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        prompt = [(place * 31) % 40_000 + 100 for place in range(PROMPT_TOKENS)]
        options: Any = {"ignore_eos": True, "cache_salt": self.salt, **self.options}
        try:
            with openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=START_S) as api:
                for chunk in api.completions.create(
                    model="small",
                    prompt=prompt,
                    max_tokens=ANSWER,
                    temperature=0,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body=options,
                ):
                    self.pieces += 1
                    self.text += "".join(choice.text for choice in chunk.choices)
                    if chunk.usage is not None:
                        self.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        except Exception as error:
            self.error = error

    def failed(self) -> str | None:
        """The code of the error that the answer ended with, before it had a token."""
        self.thread.join(START_S)
        assert self.pieces == 0
        assert isinstance(self.error, openai.APIError), self.error
        return self.error.code

    def whole(self) -> str:
        self.thread.join(START_S)
        assert not self.thread.is_alive(), "the answer never ended"
        assert self.error is None
        assert self.usage == (PROMPT_TOKENS, ANSWER)
        return self.text


def kill(pid: int) -> list[int]:
    """Kill a worker, and return its processes, of which none may be left."""
    processes = [pid, *descendants(pid)]
    assert len(processes) > 2, "a worker, SGLang's child and its scheduler"
    os.kill(pid, signal.SIGKILL)
    return processes


def must_be_gone(processes: list[int]) -> None:
    deadline = time.monotonic() + 30
    while left := [pid for pid in processes if lives(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def forgets(up: RunningUp, name: str) -> bool:
    """Have a worker forget its cache. SGLang refuses while pages are in use, or might still be written into."""
    environment = {**os.environ, **up.environment()}
    command = [sys.executable, "-P", "-m", "headrace", "worker", "reset-cache", name]
    return subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False).returncode == 0


def test_a_request_whose_prompt_never_comes_ends_at_its_deadline_and_leaves_nothing_behind(apart: RunningUp) -> None:
    """The prefill engine stands still for less than its worker takes to give it up, and the worker says that it computes."""
    before, there = len(failures(apart)), workers(apart)
    taken = once_taken(apart, lambda: Stream(apart, "never comes", deadline_s=DEADLINE_S))
    scheduler = scheduler_of(taken.prefill.pid)
    os.kill(scheduler, signal.SIGSTOP)
    try:
        assert taken.asking.failed() == "deadline_exceeded"
    finally:
        os.kill(scheduler, signal.SIGCONT)
    assert failures(apart)[before:] in ([], ["deadline"])
    no_block_is_kept(apart, 2, PAGES_BACK_S)
    for name in there:
        apart.until(f"{name} holds no page", partial(forgets, apart, name), PAGES_BACK_S)
    assert {m.worker for m in workers(apart).values()} == {m.worker for m in there.values()}, "none was replaced"
    handed = len(handed_over(apart))
    Stream(apart, "comes again").whole()
    must_be_handed_over(apart, ["prefill-1"], after=handed)


@pytest.fixture(scope="module")
def undisturbed(apart: RunningUp) -> str:
    return Stream(apart, "undisturbed").whole()


@pytest.mark.fault
@pytest.mark.long_engine  # engines start again
def test_a_prefill_worker_that_is_killed_while_it_computes_costs_time_only(apart: RunningUp, undisturbed: str) -> None:
    before = len(handed_over(apart))
    taken = once_taken(apart, lambda: Stream(apart, "prefill killed"))
    processes = kill(taken.prefill.pid)
    assert taken.asking.pieces == 0, "the prompt is computed faster than this test strikes"
    assert taken.asking.whole() == undisturbed
    must_be_gone(processes)
    assert failures(apart) in (["peer_lost"], ["transfer_failed"], ["transfer_timeout"])
    assert len(handed_over(apart)) == before
    no_block_is_kept(apart, 1, PAGES_BACK_S)
    apart.until("the killed worker is replaced", lambda: len(workers(apart)) == 2, START_S)


@pytest.mark.fault
@pytest.mark.long_engine  # engines start again
def test_the_stream_of_a_killed_decode_worker_goes_on_when_it_is_replaced(apart: RunningUp, undisturbed: str) -> None:
    before = len(handed_over(apart))
    taken = once_taken(apart, lambda: Stream(apart, "decode killed"))
    apart.until("the middle of the answer", lambda: taken.asking.pieces >= ANSWER // 3, 60)
    processes = kill(taken.decode.pid)
    assert taken.asking.whole() == undisturbed
    must_be_gone(processes)
    must_be_handed_over(apart, ["prefill-1"] * 2, after=before)  # the prompt, and the prompt with the tokens emitted so far
    no_block_is_kept(apart, 2, PAGES_BACK_S)


@pytest.mark.fault
@pytest.mark.long_engine  # an engine starts again
def test_a_prefill_engine_that_stands_still_costs_time_only(apart: RunningUp, undisturbed: str) -> None:
    """It lives and sends nothing, until its worker has seen no step for too long, and ends it."""
    apart.until("both are there", lambda: len(workers(apart)) == 2, START_S)
    before = len(failures(apart))
    taken = once_taken(apart, lambda: Stream(apart, "prefill stands still"))
    pid = taken.prefill.pid
    processes = [pid, *descendants(pid)]
    os.kill(scheduler_of(pid), signal.SIGSTOP)
    assert taken.asking.pieces == 0, "the prompt is computed faster than this test strikes"
    assert taken.asking.whole() == undisturbed
    must_be_gone(processes)
    assert failures(apart)[before:] in (["peer_lost"], ["peer_failed"], ["transfer_failed"], ["transfer_timeout"])
    no_block_is_kept(apart, 1, PAGES_BACK_S)
    apart.until("the ended worker is replaced", lambda: len(workers(apart)) == 2, START_S)
