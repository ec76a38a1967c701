"""Sends requests to a server: each connection one after the other, or each request at its time, however many are under way."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from headrace.base.errors import CommandError
from headrace.tools.replay_bench.trace import BLOCK_TOKENS, Trace, TraceRequest
from headrace.tools.serve_bench.connection import Outcome, StreamConnection

PATH = "/v1/chat/completions"
# Most tokenizers have one token for each.
WORDS = (
    *("time", "way", "year", "work", "day", "part", "place", "case", "week", "point", "home", "room", "water", "book"),
    *("word", "line", "side", "city", "name", "house"),
)


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server. `path` leads to streamed chats in OpenAI's form."""

    host: str
    port: int
    model: str
    key: str = ""
    path: str = PATH

    async def connect(self, outcome: Outcome) -> StreamConnection:
        """Open a connection. Raises CommandError."""
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: StreamConnection(outcome, self.key, host=f"{self.host}:{self.port}"), self.host, self.port
            )
        except OSError as error:
            raise CommandError(f"no connection to {self.host}:{self.port}: {error.strerror or error}") from error
        return connection


def target(url: str, model: str, key: str = "") -> Target:
    """Return the server at a URL. Raises CommandError for one that this client cannot speak to."""
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError as error:
        raise CommandError(f"{url}: {error}") from None
    if parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment:
        raise CommandError(f"{url}: the address of the server is http://HOST:PORT, perhaps with a path before {PATH}")
    return Target(parts.hostname, port, model, key, parts.path.rstrip("/") + PATH)


# Bodies.


def body(model: str, words: Sequence[str], tokens: int) -> bytes:
    """Return a streamed chat that gets exactly so many tokens."""
    return json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": " ".join(words)}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()


def bodies(model: str, *, requests: int, words: int, tokens: int, seed: int) -> list[bytes]:
    """Return bodies with a prompt of its own each, so that no cache of whole prompts answers."""
    found = []
    for number in range(requests):
        rng = random.Random(seed * 1_000_003 + number)  # noqa: S311  # a load, not a secret
        found.append(body(model, [rng.choice(WORDS) for _ in range(words)], tokens))
    return found


def trace_body(model: str, request: TraceRequest) -> bytes:
    """Return a prompt of about as many words as the request of the trace has tokens; equal blocks have equal words."""
    words: list[str] = []
    for block in request.chain:
        rng = random.Random(block)  # noqa: S311  # a load, not a secret
        words += [rng.choice(WORDS) for _ in range(BLOCK_TOKENS)]
    return body(model, words[: request.tokens], request.output)


# Times.


def steady(rate: float, requests: int) -> list[float]:
    """Return times at equal distances, in seconds."""
    return [number / rate for number in range(requests)]


def poisson(rate: float, requests: int, seed: int) -> list[float]:
    """Return times of a Poisson process: what many clients that know nothing of each other make."""
    rng = random.Random(seed)  # noqa: S311  # a load, not a secret
    at_s, found = 0.0, []
    for _ in range(requests):
        found.append(at_s)
        at_s += rng.expovariate(rate)
    return found


def trace_times(trace: Trace, speed: float) -> list[float]:
    """Return the times of a trace, `speed` times as fast, from its first request on."""
    return [(request.at_s - trace.requests[0].at_s) / speed for request in trace.requests]


# Runs.


async def run_closed(
    server: Target, asked: Iterable[bytes], *, streams: int, timeout_s: float, on_end: Callable[[], None] = _nothing
) -> Outcome:
    """Send these over so many connections, each its next one when its last has ended. Raises CommandError.

    `on_end` is called after each.
    """
    outcome = Outcome()
    waiting = iter(asked)

    async def stream() -> None:
        connection: StreamConnection | None = None
        try:
            for one in waiting:
                connection = connection or await server.connect(outcome)
                if not await _ask(connection, one, server.path):
                    _close(connection)
                    connection = None
                on_end()
        finally:
            if connection is not None:
                _close(connection)

    started = time.perf_counter()
    await _all([stream() for _ in range(streams)], timeout_s)
    outcome.seconds = time.perf_counter() - started
    return outcome


async def run_at(
    server: Target,
    asked: Sequence[bytes],
    at_s: Sequence[float],
    *,
    timeout_s: float,
    on_end: Callable[[], None] = _nothing,
) -> Outcome:
    """Send each at its time after the start, over connections that are free, or new ones. Raises CommandError.

    `on_end` is called after each.
    """
    outcome = Outcome()
    free: list[StreamConnection] = []

    async def one(ask: bytes, when_s: float) -> None:
        await asyncio.sleep(max(0.0, started + when_s - time.perf_counter()))
        connection = free.pop() if free else await server.connect(outcome)
        kept = False
        try:
            kept = await _ask(connection, ask, server.path)
        finally:
            free.append(connection) if kept else _close(connection)
            on_end()

    started = time.perf_counter()
    try:
        await _all([one(ask, when_s) for ask, when_s in zip(asked, at_s, strict=True)], timeout_s)
    finally:
        for connection in free:
            _close(connection)
    outcome.seconds = time.perf_counter() - started
    return outcome


async def _ask(connection: StreamConnection, ask: bytes, path: str) -> bool:
    """Send a request and wait for its end. Returns whether the connection can be used again."""
    await connection.send(ask, path)
    return connection.answered


async def _all(work: Sequence[Coroutine[None, None, None]], timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
            for one in work:
                tasks.create_task(one)
    except TimeoutError:
        raise CommandError(f"the requests did not end within {timeout_s:g} s") from None
    except BaseExceptionGroup as errors:
        refused, others = errors.split(CommandError)
        if refused is None or others is not None:
            raise
        raise refused.exceptions[0] from None


def _close(connection: StreamConnection) -> None:
    if connection.transport is not None:
        connection.transport.close()
