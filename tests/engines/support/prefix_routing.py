"""Shows, on two real engines under one router, that a prompt goes to the worker whose cache has its beginning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import openai

from tests.support.up_process import RunningUp

PREFIXES = 4
PREFIX_TOKENS = 320
PREFIX_BLOCKS = PREFIX_TOKENS // 32
SUFFIX_TOKENS = 20
TRIES = 3


@dataclass(frozen=True)
class Placed:
    """Where a request went, what the router knew, and what the engine found in its cache."""

    id: str
    worker: str
    known: dict[str, int]  # cached blocks of the prompt by worker
    cached_tokens: int
    decision: dict[str, Any]  # as the client is told


def prefix(number: int) -> list[int]:
    return [(number * 7919 + place * 31) % 40_000 + 100 for place in range(PREFIX_TOKENS)]


def ask(up: RunningUp, number: int, turn: int) -> Placed:
    """Ask with this prefix and an ending of its own."""
    prompt = prefix(number) + [(turn * 613 + number * 17 + place) % 30_000 + 200 for place in range(SUFFIX_TOKENS)]
    with openai.OpenAI(base_url=f"{up.state()['url']}/v1", api_key="none", max_retries=0, timeout=120) as api:
        given = api.completions.with_raw_response.create(
            model="small", prompt=prompt, max_tokens=2, temperature=0, extra_headers={"X-Headrace-Explain": "1"}
        )
    answer: Any = given.parse()
    decision = json.loads(given.headers["x-headrace-decision"])
    details = answer.usage.prompt_tokens_details
    return Placed(
        id=answer.id,
        worker=decision["worker"],
        known={candidate["worker"]: candidate.get("device", 0) for candidate in decision["candidates"]},
        cached_tokens=details.cached_tokens if details is not None else 0,
        decision=decision,
    )


def explained(up: RunningUp, request: str) -> str:
    """What `headrace router explain` prints."""
    environment = {**os.environ, **up.environment()}
    command = [sys.executable, "-P", "-m", "headrace", "router", "explain", request]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60).stdout


def must_follow_the_cache(up: RunningUp) -> None:
    """Ask twice with each prefix, the second time in another order.

    At first a router knows the speeds of workers from a few steps on a busy machine, and such an estimate may outweigh a cached
    prefix: it has `TRIES` sets of prefixes to learn better ones.
    """
    for number in range(TRIES):
        try:
            _follow(up, range(number * PREFIXES, (number + 1) * PREFIXES))
        except AssertionError:
            if number == TRIES - 1:
                raise
        else:
            return


def _follow(up: RunningUp, numbers: range) -> None:
    with ThreadPoolExecutor(PREFIXES) as threads:  # at once, so that both workers get some
        first = dict(zip(numbers, threads.map(lambda number: ask(up, number, turn=1), numbers), strict=True))
    assert len({placed.worker for placed in first.values()}) == 2, first
    assert [placed.cached_tokens for placed in first.values()] == [0] * PREFIXES
    for number in (numbers[2], numbers[0], numbers[3], numbers[1]):
        second = ask(up, number, turn=2)
        holder = first[number].worker
        assert second.worker == holder, (first[number], second)
        assert second.known[holder] == PREFIX_BLOCKS
        assert [blocks for worker, blocks in second.known.items() if worker != holder] == [0]
        assert second.cached_tokens == PREFIX_TOKENS
        printed = explained(up, second.id)
        assert f"placed on {holder}" in printed
        assert "reason prefix" in printed, printed
