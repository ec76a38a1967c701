"""A request that crashes its workers is found and taken out of service, and what ran beside it survives and hardly waits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.jetstream.errors import JetStreamError
from headrace.workers.sim.tokens import expected_text
from tests.faults.support.scene import Scene, deployed
from tests.faults.test_workers_come_and_go import SLOW, holders
from tests.support.up_process import RunningUp

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

REQUESTS = 64
TOKENS = 60
POISON = list(range(300, 340))


def headrace(up: RunningUp, *words: str) -> str:
    """What a command says."""
    command = [sys.executable, "-P", "-m", "headrace", *words, "--data-dir", up.environment()["HEADRACE_DATA_DIR"]]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def dead_letters(up: RunningUp) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(headrace(up, "dlq", "ls", "--json"))
    return found


def client(up: RunningUp) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{up.state()['url']}/v1", api_key="none", max_retries=0, timeout=120)


async def text_of(api: openai.AsyncOpenAI, prompt: list[int], tokens: int, **extra: Any) -> str:
    stream = await api.completions.create(
        model="sim", prompt=prompt, max_tokens=tokens, temperature=0, stream=True, extra_body={"ignore_eos": True, **extra}
    )
    return "".join([choice.text async for chunk in stream for choice in chunk.choices])


async def test_one_of_64_requests_crashes_its_workers_and_the_63_beside_it_are_answered(
    start: Callable[..., RunningUp],
) -> None:
    up = start("--workers", "3", "--engine-arg", "allow_request_faults=true", *SLOW)
    await asyncio.to_thread(up.until, "all workers joined", lambda: len(holders(up)) == 3, 90)
    innocents = [[400 + n, 500 + n] for n in range(REQUESTS - 1)]
    async with client(up) as api, asyncio.TaskGroup() as group:
        texts = [group.create_task(text_of(api, prompt, TOKENS)) for prompt in innocents]
        with pytest.raises(openai.APIError) as ended:
            await text_of(api, POISON, 40, vllm_xargs={"sim": {"crash_at_token": 10}})
    assert ended.value.code == "poison"
    assert [text.result() for text in texts] == [expected_text(prompt, TOKENS) for prompt in innocents]
    (letter,) = dead_letters(up)
    assert letter["reason"] == "poison"
    groups = [entry["group"] for entry in letter["history"]]
    assert 3 <= len(groups) == len({entry["worker"] for entry in letter["history"]}) <= 7
    assert groups[-1] == 1, "it was alone at last"
    number = str(letter["number"])
    assert f"request {letter['request']}, poison" in headrace(up, "dlq", "show", number)
    assert headrace(up, "dlq", "drop", number) == "1 dead letter dropped\n"
    assert dead_letters(up) == []


async def test_a_request_that_the_dead_engine_names_is_poison_after_two_and_no_other_job_is_suspect(
    start: Callable[..., RunningUp],
) -> None:
    up = start("--workers", "3", "--engine-arg", "allow_request_faults=true", *SLOW)
    await asyncio.to_thread(up.until, "all workers joined", lambda: len(holders(up)) == 3, 90)
    innocents = [[400 + n, 500 + n] for n in range(12)]
    async with client(up) as api, asyncio.TaskGroup() as group:
        texts = [group.create_task(text_of(api, prompt, TOKENS)) for prompt in innocents]
        with pytest.raises(openai.APIError) as ended:
            await text_of(api, POISON, 40, vllm_xargs={"sim": {"die_at_token": 10}})
    assert ended.value.code == "poison"
    assert [text.result() for text in texts] == [expected_text(prompt, TOKENS) for prompt in innocents]
    (letter,) = dead_letters(up)
    assert [entry["group"] for entry in letter["history"]] == [1, 1]


POISONS = 5
MOST_CRASHES = 20


def crashes(scene: Scene) -> int:
    """How many workers of the deployment have died of SIGKILL."""
    return sum(scene.log(worker.name).count('"exit_code": -9') for worker in scene.deployment.of_kind("worker"))


async def test_five_of_64_requests_crash_their_workers_and_the_59_beside_them_are_answered(tmp_path: Path) -> None:
    """Promise: of five poison requests at once each ends as one, after 20 crashes of workers at most, and no request that ran
    beside them does."""
    engine = ('timing_overrides={"decode_base_s": 0.02, "prefill_tokens_per_s": 20000}', "allow_request_faults=true")
    async with deployed(tmp_path, workers=4, engine=engine) as scene:
        crash = {"vllm_xargs": {"sim": {"crash_at_token": 10}}}
        poisons = [scene.begin(scene.question(40), extra=crash, name=f"poison-{n}") for n in range(POISONS)]
        innocents = [scene.begin(scene.question(TOKENS), deadline_s=120) for _ in range(REQUESTS - POISONS)]
        await scene.answered(*innocents)
        for asked in poisons:
            assert asked.task is not None
            await asked.task
            assert ", poison: " in asked.detail, (asked.outcome, asked.detail)
        letters = json.loads(await scene.command("dlq", "ls", "--json"))
        assert sorted(letter["reason"] for letter in letters) == ["poison"] * POISONS
        await scene.well()  # the last crash is in the log then
        assert 2 * 3 < crashes(scene) <= MOST_CRASHES
        await scene.at_rest()


def gaps(came: list[float]) -> float:
    """The longest time between two events of a stream, in seconds."""
    return max((later - sooner for sooner, later in itertools.pairwise(came)), default=0.0)


@pytest.mark.slow
async def test_two_kills_of_workers_hold_up_neither_their_streams_nor_new_requests(tmp_path: Path) -> None:
    """60 streams on three workers, of which two are killed four seconds apart: no innocent becomes a suspect."""
    step = ('timing_overrides={"decode_base_s": 0.05}',)
    async with deployed(tmp_path, workers=3, engine=step) as scene:
        await asyncio.sleep(5.0)  # longer than a lease: a router that is new takes longer to believe that a worker is gone
        streams = [scene.begin(scene.question(200)) for _ in range(60)]
        await asyncio.sleep(2.0)
        for worker in ("aggregated-1", "aggregated-2"):
            scene.deployment.kill(scene.process(worker))
            await asyncio.sleep(4.0)
        began = time.monotonic()
        new = [scene.begin(scene.question(5)) for _ in range(10)]
        await scene.answered(*new, *streams)
        assert max(asked.came[0] - began for asked in new) < 5.0, "of one second on a quiet machine"
        assert max(gaps(asked.came) for asked in streams) < 5.0
        assert json.loads(await scene.command("dlq", "ls", "--json")) == []


async def test_drains_and_a_broker_restart_never_count(start: Callable[..., RunningUp]) -> None:
    """As many hand-overs as a poison request has lives, and a broker that is killed."""
    up = start("--workers", "4", "--engine-arg", 'timing_overrides={"decode_base_s": 0.04}')
    await asyncio.to_thread(up.until, "all workers joined", lambda: len(holders(up)) == 4, 90)

    def busy() -> list[str]:
        with contextlib.suppress(JetStreamError):
            return [worker for worker, (_, runs) in holders(up).items() if runs]
        return []

    async with client(up) as api, asyncio.TaskGroup() as group:
        text = group.create_task(text_of(api, POISON, 400))
        was: list[str] = []
        for turn in range(3):
            async with asyncio.timeout(30):
                while not (found := await asyncio.to_thread(busy)) or found == was:
                    await asyncio.sleep(0.05)
            was = found
            if turn == 1:
                os.kill(up.state()["nats"]["pid"], signal.SIGKILL)
                await asyncio.to_thread(up.until, "the broker is back", lambda: bool(busy()))
            await asyncio.to_thread(headrace, up, "worker", "drain", was[0], "--grace", "0")
        assert not text.done(), "it was to be handed over to the end"
    assert text.result() == expected_text(POISON, 400)
    assert dead_letters(up) == []
