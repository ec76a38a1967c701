"""A streaming client: N connections, each sends its next request when the last has ended; or one that sends at given times."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.tools.bench.load import Outcome, StreamConnection

WORDS = tuple(f"word{n}" for n in range(24))
PATH = "/v1/chat/completions"


@dataclass(frozen=True)
class Workload:
    """`streams` connections, `requests` in all, prompts of `prompt_words` words, `tokens` tokens each."""

    streams: int
    requests: int
    tokens: int
    prompt_words: int = 32
    model: str = "sim"


def request_body(workload: Workload, number: int) -> bytes:
    """Return the body of request `number`, each with another prompt, so that no cache of whole prompts answers."""
    rng = random.Random(number)
    words = " ".join(rng.choice(WORDS) for _ in range(workload.prompt_words))
    return json.dumps(
        {
            "model": workload.model,
            "messages": [{"role": "user", "content": words}],
            "max_tokens": workload.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()


async def run_workload(
    host: str, port: int, workload: Workload, *, first: int = 0, key: str = "", timeout_s: float = 300.0
) -> Outcome:
    """Run it once. `first` numbers the first request, so that runs do not repeat each other's prompts."""
    bodies = [request_body(workload, n) for n in range(first, first + workload.requests)]
    return await run_bodies(host, port, bodies, streams=workload.streams, key=key, timeout_s=timeout_s)


async def run_bodies(
    host: str, port: int, bodies: Iterable[bytes], *, streams: int, key: str = "", timeout_s: float = 300.0
) -> Outcome:
    """Send these, each connection its next one when its last has ended. `key`: an API key."""
    outcome = Outcome()
    waiting = iter(bodies)
    loop = asyncio.get_running_loop()

    async def stream() -> None:
        _, connection = await loop.create_connection(lambda: StreamConnection(outcome, key), host, port)
        try:
            for body in waiting:
                await connection.send(body, PATH)
        finally:
            assert connection.transport is not None
            connection.transport.close()

    started = time.perf_counter()
    async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
        for _ in range(streams):
            tasks.create_task(stream())
    outcome.seconds = time.perf_counter() - started
    return outcome


async def run_arrivals(
    host: str, port: int, bodies: Sequence[bytes], *, at_s: Sequence[float], timeout_s: float = 300.0
) -> Outcome:
    """Send each at its time after the start, however many are under way: an open loop, each on a connection of its own."""
    outcome = Outcome()
    loop = asyncio.get_running_loop()

    async def one(body: bytes, when_s: float) -> None:
        await asyncio.sleep(max(0.0, started + when_s - time.perf_counter()))
        _, connection = await loop.create_connection(lambda: StreamConnection(outcome), host, port)
        try:
            await connection.send(body, PATH)
        finally:
            assert connection.transport is not None
            connection.transport.close()

    started = time.perf_counter()
    async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
        for body, when_s in zip(bodies, at_s, strict=True):
            tasks.create_task(one(body, when_s))
    outcome.seconds = time.perf_counter() - started
    return outcome
