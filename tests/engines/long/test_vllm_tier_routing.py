"""Two real vLLM workers with a host tier under a router: a prefix that lies on the host alone counts, and less than one on the
device.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engines.conftest import ARGS
from tests.engines.support.prefix_routing import PREFIX_BLOCKS, PREFIX_TOKENS, TRIES, explained, prefix
from tests.support.handovers import workers
from tests.support.up_process import RunningUp

pytestmark = [pytest.mark.engine, pytest.mark.long_engine, pytest.mark.timeout(600)]

ENGINES_START_S = 300.0
FILLERS = 3  # prompts of the length of a prefix: two of them leave nothing of another one on the device
TIERS: dict[str, Any] = ARGS | {"max_model_len": 512, "kv_cache_memory_bytes": 32 << 20, "kv_offloading_size": 0.25}


@dataclass(frozen=True)
class Answered:
    """Where a request went, and what the router saw."""

    id: str
    worker: str
    cached_tokens: int
    seen: dict[str, tuple[int, int]]  # by worker: blocks of the prompt on the device, and on the host alone


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[RunningUp]:
    flags = [flag for name, value in TIERS.items() for flag in ("--engine-arg", f"{name}={value}")]
    named = ("--workers", "2", "--model", str(model_dir), "--served-name", "small", "--metrics-port", "0")
    up = RunningUp(tmp_path_factory.mktemp("tiers"), *named, *flags, engine="vllm")
    try:
        up.until("ready", lambda: up.state()["ready"], ENGINES_START_S)
        up.until("both workers joined", lambda: len(workers(up)) == 2, ENGINES_START_S)
        up.until("the router works", lambda: bool(up.events("router.ready")))
        yield up
        up.process.terminate()
        assert up.process.wait(60) == 0, up.log()
    finally:
        up.stop()


def ids(up: RunningUp) -> list[str]:
    return sorted(member.worker for member in workers(up).values())


def ask(up: RunningUp, prompt: list[int], *, worker: str = "") -> Answered:
    headers = {"X-Headrace-Explain": "1"} | ({"X-Headrace-Worker": worker} if worker else {})
    with openai.OpenAI(base_url=f"{up.state()['url']}/v1", api_key="none", max_retries=0, timeout=120) as api:
        given = api.completions.with_raw_response.create(
            model="small", prompt=prompt, max_tokens=1, temperature=0, extra_headers=headers
        )
    answer: Any = given.parse()
    decision = json.loads(given.headers["x-headrace-decision"])
    details = answer.usage.prompt_tokens_details
    return Answered(
        id=answer.id,
        worker=decision["worker"],
        cached_tokens=details.cached_tokens if details is not None else 0,
        seen={one["worker"]: (one.get("device", 0), one.get("host", 0)) for one in decision["candidates"]},
    )


def on_host(up: RunningUp, worker: str) -> int:
    """Return how many blocks of its host tier a worker tells."""
    name = worker.rpartition("-")[0]
    (port,) = {event["port"] for event in up.events("metrics.listening") if event.get("worker") == name}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        lines = page.read().decode().splitlines()
    told = [line for line in lines if re.match(r'headrace_worker_kv_blocks\{.*tier="host"', line)]
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in told)


def leave_on_host(up: RunningUp, number: int, worker: str) -> None:
    """Have a worker compute a prefix, and then as many other prompts as leave it on the host alone."""
    before = on_host(up, worker)
    numbers = (number, *(1000 + number * FILLERS + place for place in range(FILLERS)))
    for one in numbers:
        ask(up, [*prefix(one), 7], worker=worker)
    up.until("the host tier is told", lambda: on_host(up, worker) >= before + len(numbers) * PREFIX_BLOCKS, 60.0)


def again(tried: Callable[[int], None]) -> None:
    """Try with other prefixes: at first a router knows the speeds of workers from a few steps on a busy machine."""
    for number in range(TRIES):
        try:
            tried(number)
        except AssertionError:
            if number == TRIES - 1:
                raise
        else:
            return


def test_a_prompt_goes_to_the_worker_that_has_its_beginning_on_the_host_alone(two: RunningUp) -> None:
    first, second = ids(two)

    def tried(number: int) -> None:
        holder, other = (first, second) if number % 2 == 0 else (second, first)
        leave_on_host(two, 10 + number, holder)
        placed = ask(two, [*prefix(10 + number), 8])
        assert placed.seen == {holder: (0, PREFIX_BLOCKS), other: (0, 0)}
        assert placed.worker == holder
        assert placed.cached_tokens == PREFIX_TOKENS
        printed = explained(two, placed.id)
        assert re.search(r"device +host +disk", printed), printed
        assert re.search(rf"{holder} +0 +{PREFIX_BLOCKS} +0 ", printed), printed

    again(tried)


def test_a_prefix_on_the_device_counts_more_than_one_on_the_host(two: RunningUp) -> None:
    first, second = ids(two)

    def tried(number: int) -> None:
        on_device, lower = (first, second) if number % 2 == 0 else (second, first)
        leave_on_host(two, 20 + number, lower)
        ask(two, [*prefix(20 + number), 7], worker=on_device)
        placed = ask(two, [*prefix(20 + number), 8])
        assert placed.seen == {on_device: (PREFIX_BLOCKS, 0), lower: (0, PREFIX_BLOCKS)}
        assert placed.worker == on_device
        assert placed.cached_tokens == PREFIX_TOKENS

    again(tried)
