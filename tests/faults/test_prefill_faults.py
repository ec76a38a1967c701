"""Prefill and decode workers killed and frozen around a hand-over over NIXL: every answer is exact, no block is kept.

The simulator computes 2,000 prompt tokens a second here and takes a second over each transfer, so that there is time to strike.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import openai
import pytest

from headrace.broker.codec import encode, pack_u32
from headrace.broker.messages.prefill import PrefillJob
from headrace.broker.messages.requests import Generation
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import QueueFull
from headrace.workers.sim.tokens import expected_text
from tests.integration.headrace.test_operator_commands import headrace
from tests.support.handovers import SUBJECTS, Taken, failures, no_block_is_kept, once_taken, workers
from tests.support.nixl_peer import needs_nixl
from tests.support.up_process import RunningUp

pytestmark = [pytest.mark.fault, needs_nixl]

TIMING = '{"prefill_tokens_per_s": 2000, "decode_base_s": 0.01, "transfer_per_descriptor_s": 1.0}'
ALWAYS = ("--mode", "disagg", "--prefill", "always", "--routers", "0", "--engine-arg", f"timing_overrides={TIMING}")
PROMPT = list(range(1000, 3000))  # a second to compute
ANSWER = 60
COMPUTING_S, TRANSFERRING_S = 0.2, 1.4  # after somebody has taken the prompt
MEANWHILE = pytest.mark.parametrize(
    "after_s", [COMPUTING_S, TRANSFERRING_S], ids=["before the transfer", "during the transfer"]
)


class Asking:
    """One streamed completion in a thread of its own."""

    def __init__(self, up: RunningUp, prompt: list[int] = PROMPT, max_tokens: int = ANSWER) -> None:
        self.prompt, self.max_tokens = prompt, max_tokens
        self.url = f"{up.state()['url']}/v1"
        self.text = self.answer_id = ""
        self.error: Exception | None = None
        self.first_s: float | None = None
        self.began_s = time.monotonic()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            with openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60) as api:
                stream = api.completions.create(
                    model="sim",
                    prompt=self.prompt,
                    max_tokens=self.max_tokens,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                for chunk in stream:
                    self.first_s = self.first_s or time.monotonic()
                    self.answer_id = chunk.id
                    self.text += "".join(choice.text for choice in chunk.choices)
        except Exception as error:
            self.error = error

    def must_be_exact(self) -> None:
        self.thread.join(60)
        assert not self.thread.is_alive(), "the answer never ended"
        assert self.error is None
        assert self.text == expected_text(self.prompt, self.max_tokens)


def ask(up: RunningUp) -> Taken[Asking]:
    return once_taken(up, lambda: Asking(up))


def begin(start: Callable[..., RunningUp], *flags: str, prefill: int = 1, decode_workers: int = 1) -> RunningUp:
    up = start(*ALWAYS, "--prefill-workers", str(prefill), "--decode-workers", str(decode_workers), *flags)
    up.until("all have joined", lambda: len(workers(up)) == prefill + decode_workers)
    up.until("all have met", lambda: len(up.events("peer.met")) == prefill * decode_workers)
    return up


def test_a_prompt_is_computed_elsewhere_and_its_blocks_are_let_go(start: Callable[..., RunningUp]) -> None:
    up = begin(start)
    asking = Asking(up)
    asking.must_be_exact()
    assert failures(up) == []
    no_block_is_kept(up, 2)
    told = headrace(up.run_file.parents[2], "trace", asking.answer_id, "--json")
    assert told.returncode == 0, told.stderr
    (story,) = json.loads(told.stdout)["stories"]
    assert [part["name"] for part in story["stages"]] == ["queue", "prefill", "transfer", "decode"]
    (transfer,) = [part for part in story["stages"] if part["name"] == "transfer"]
    assert transfer["end_s"] - transfer["begin_s"] > 0.9, "it is made to take a second"


@MEANWHILE
def test_a_prefill_worker_is_killed(start: Callable[..., RunningUp], after_s: float) -> None:
    up = begin(start)
    taken = ask(up)
    time.sleep(after_s)
    os.kill(taken.prefill.pid, signal.SIGKILL)
    taken.asking.must_be_exact()
    assert failures(up) in (["peer_lost"], ["transfer_failed"], ["transfer_timeout"])
    no_block_is_kept(up, 1)


def test_a_prefill_worker_is_killed_after_the_transfer(start: Callable[..., RunningUp]) -> None:
    up = begin(start)
    asking = Asking(up, max_tokens=200)
    up.until("the first token", lambda: asking.first_s is not None)
    os.kill(workers(up)["prefill-1"].pid, signal.SIGKILL)
    asking.must_be_exact()
    assert failures(up) == []
    no_block_is_kept(up, 1)


def test_another_prefill_worker_takes_over(start: Callable[..., RunningUp]) -> None:
    up = begin(start, prefill=2)
    taken = ask(up)
    os.kill(taken.prefill.pid, signal.SIGKILL)
    taken.asking.must_be_exact()
    assert len(failures(up)) == 1
    no_block_is_kept(up, 2)


def test_a_frozen_prefill_worker_costs_a_bounded_wait(start: Callable[..., RunningUp]) -> None:
    up = begin(start)
    taken = ask(up)
    time.sleep(COMPUTING_S)
    os.kill(taken.prefill.pid, signal.SIGSTOP)
    try:
        taken.asking.must_be_exact()
    finally:
        os.kill(taken.prefill.pid, signal.SIGCONT)
    assert failures(up) == ["peer_lost"]
    no_block_is_kept(up, 2)


@MEANWHILE
def test_a_decode_worker_is_killed_while_it_waits(start: Callable[..., RunningUp], after_s: float) -> None:
    up = begin(start, decode_workers=2)
    taken = ask(up)
    time.sleep(after_s)
    os.kill(taken.decode.pid, signal.SIGKILL)
    taken.asking.must_be_exact()
    no_block_is_kept(up, 2)


def test_a_transfer_that_stalls_is_given_up(start: Callable[..., RunningUp]) -> None:
    up = start(*ALWAYS, "--transfer-timeout", "1.5", "--engine-arg", 'faults={"stall_transfer": true}')
    up.until("all have joined", lambda: len(workers(up)) == 2)
    Asking(up).must_be_exact()
    assert failures(up)[0] in ("transfer_timeout", "transfer_failed")
    no_block_is_kept(up, 2)


def test_a_full_prefill_queue_means_computing_here(start: Callable[..., RunningUp]) -> None:
    up = begin(start)
    member = workers(up)["prefill-1"]
    os.kill(member.pid, signal.SIGSTOP)
    try:
        asyncio.run(_fill(up, member.pool))
        asking = Asking(up)
        asking.must_be_exact()
    finally:
        os.kill(member.pid, signal.SIGCONT)
    assert failures(up) == ["queue_full"]
    no_block_is_kept(up, 2)


async def _fill(up: RunningUp, pool: str) -> None:
    """Jobs of a decode worker that does not exist, until the queue takes no more."""
    now = time.time()
    options = up.connect_options()
    async with await Connection.connect(options, subjects=SUBJECTS) as connection:
        payload = encode(Generation(token_ids=pack_u32([1, 2, 3])))
        with suppress(QueueFull):
            while True:
                name = secrets.token_hex(8)
                job = PrefillJob(
                    job=name,
                    id=name,
                    attempt=1,
                    decode="nobody",
                    deadline=now + 600,
                    created=now - 60,
                    tokens=3,
                    uncached=3,
                    payload=payload,
                )
                await asyncio.gather(*(connection.publish(SUBJECTS.prefill(pool), encode(job)) for _ in range(64)))


def test_a_client_that_leaves_while_its_prompt_is_computed_frees_both_sides(
    start: Callable[..., RunningUp], tmp_path: Path
) -> None:
    up = begin(start)
    for wait_s in (0.4, 1.6):
        url = f"{up.state()['url']}/v1"
        with (
            openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=wait_s) as api,
            pytest.raises(openai.APITimeoutError),
        ):
            api.completions.create(model="sim", prompt=[7, *PROMPT], max_tokens=ANSWER, extra_body={"ignore_eos": True})
        no_block_is_kept(up, 2)
