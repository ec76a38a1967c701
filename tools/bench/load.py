"""Speaks HTTP to a server for a client that streams answers, cheaply enough to load a server from one process.

It speaks HTTP/1.1 on a raw asyncio protocol, because a general client would cost more CPU than the server under test: on two
cores that would measure the client.  What it counts, it parses from the bytes that came: a token chunk is an SSE event whose
delta has content, whatever else it has, and a request counts only if its status was 200 and its stream ended with `[DONE]`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from headrace.base.errors import CommandError
from headrace.tools.replay_bench.trace import BLOCK_TOKENS, Trace, TraceRequest

CONTENT = b'"content":"'
EMPTY_CONTENT = b'"content":""'  # beside the role, in a stream's first event
DONE = b"data: [DONE]"
CHUNKED = b"transfer-encoding: chunked"
LAST_CHUNK = b"0\r\n\r\n"
USAGE = b'"usage":{'


@dataclass
class Outcome:
    """The figures of one run. Times in seconds."""

    seconds: float = 0.0
    ok: int = 0
    failed: int = 0
    chunks: int = 0
    first_token_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    gaps_s: list[tuple[float, int]] = field(default_factory=list)  # between tokens, and how many came after such a gap
    errors: list[str] = field(default_factory=list)
    reported: int = 0  # answers that told their usage, as those do that were asked to
    prompt_tokens: int = 0  # of these
    cached_tokens: int = 0

    def percentile_ms(self, which: str, p: float) -> float:
        values = sorted(getattr(self, which))
        return values[min(len(values) - 1, int(len(values) * p))] * 1e3 if values else float("nan")


class StreamConnection(asyncio.Protocol):
    """A connection to a server that asks one request after the other. Needs a `path` of a streamed answer with `[DONE]`."""

    def __init__(self, outcome: Outcome, key: str = "", *, host: str = "localhost") -> None:
        """`key`: an API key. `host`: as the header `Host` has it."""
        self.outcome = outcome
        self.more = b"Host: %b\r\n" % host.encode() + (f"Authorization: Bearer {key}\r\n".encode() if key else b"")
        self.transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] | None = None
        self._reset()

    def _reset(self) -> None:
        self.started = time.perf_counter()
        self.head: bytes | None = b""
        self.tail = b""
        self.first = self.last = 0.0
        self.chunks = 0
        self.chunked = self.said_done = False
        self.answered = False  # as it should be, so that the connection can be used again

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def send(self, body: bytes, path: str) -> asyncio.Future[None]:
        """Ask. The future ends with the answer, whatever it is. Raises ConnectionError before the connection is made."""
        if self.transport is None:
            raise ConnectionError("not connected")
        self._reset()
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(
            b"POST %s HTTP/1.1\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n"
            % (path.encode(), self.more, len(body))
            + body
        )
        return self.done

    def data_received(self, data: bytes) -> None:
        if self.head is not None:
            self.head += data
            end = self.head.find(b"\r\n\r\n")
            if end < 0:
                return
            status, data, self.head = self.head[:end], self.head[end + 4 :], None
            self.chunked = CHUNKED in status.lower()
            if b" 200 " not in status.split(b"\r\n", 1)[0]:
                self._end(status.split(b"\r\n", 1)[0].decode() + " " + data[:200].decode(errors="replace"))
                return
        data = self.tail + data
        cut = data.rfind(b"\n\n") + 2  # whole events only; the rest waits for more
        whole, self.tail = (data[:cut], data[cut:]) if cut > 1 else (b"", data)
        n = whole.count(CONTENT) - whole.count(EMPTY_CONTENT)
        if n:
            now = time.perf_counter()
            if not self.chunks:
                self.first = now
            else:  # what comes in one read is taken to have come evenly
                self.outcome.gaps_s.append(((now - self.last) / n, n))
            self.last = now
        self.chunks += n
        at = whole.rfind(USAGE)
        if at >= 0:
            self._count(whole[at + len(USAGE) - 1 : whole.index(b"\n", at) - 1])
        self.said_done = self.said_done or DONE in whole
        if self.said_done and (not self.chunked or self.tail.endswith(LAST_CHUNK)):
            self._end(None)  # not before the body's last chunk: it would be taken for the head of the next answer

    def _count(self, usage: bytes) -> None:
        found = json.loads(usage)
        self.outcome.reported += 1
        self.outcome.prompt_tokens += found["prompt_tokens"]
        self.outcome.cached_tokens += found["prompt_tokens_details"]["cached_tokens"]

    def _end(self, error: str | None) -> None:
        now = time.perf_counter()
        outcome = self.outcome
        if error is None and self.chunks:
            self.answered = True
            outcome.ok += 1
            outcome.chunks += self.chunks
            outcome.first_token_s.append(self.first - self.started)
            outcome.total_s.append(now - self.started)
        else:
            outcome.failed += 1
            outcome.errors.append(error or "no token")
        if self.done is not None and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self._end(f"connection lost: {exc}")


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
