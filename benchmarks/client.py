"""A streaming client: N connections, each sends its next request when the last has ended; or one that sends at given times.

It speaks HTTP/1.1 on a raw asyncio protocol, because a general client would cost more CPU than the server under test: on two
cores that would measure the client.  What it counts, it parses from the bytes that came: a token chunk is an SSE event whose
delta has content, whatever else it has, and a request counts only if its status was 200 and its stream ended with `[DONE]`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

WORDS = tuple(f"word{n}" for n in range(24))
CONTENT = b'"content":"'
EMPTY_CONTENT = b'"content":""'  # beside the role, in a stream's first event
PATH = "/v1/chat/completions"
DONE = b"data: [DONE]"
CHUNKED = b"transfer-encoding: chunked"
LAST_CHUNK = b"0\r\n\r\n"
USAGE = b'"usage":{'


@dataclass(frozen=True)
class Workload:
    """`streams` connections, `requests` in all, prompts of `prompt_words` words, `tokens` tokens each."""

    streams: int
    requests: int
    tokens: int
    prompt_words: int = 32
    model: str = "sim"


@dataclass
class Outcome:
    """What one run gave. Times in seconds."""

    seconds: float = 0.0
    ok: int = 0
    failed: int = 0
    chunks: int = 0
    first_token_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    reported: int = 0  # answers that told their usage, as those do that were asked to
    prompt_tokens: int = 0  # of these
    cached_tokens: int = 0

    def percentile_ms(self, which: str, p: float) -> float:
        values = sorted(getattr(self, which))
        return values[min(len(values) - 1, int(len(values) * p))] * 1e3 if values else float("nan")


def request_body(workload: Workload, number: int) -> bytes:
    """Every request has another prompt, so that nothing is answered from a cache of whole prompts."""
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


class _Connection(asyncio.Protocol):
    def __init__(self, outcome: Outcome, key: str = "") -> None:
        self.outcome = outcome
        self.more = f"Authorization: Bearer {key}\r\n".encode() if key else b""
        self.transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] | None = None
        self._reset()

    def _reset(self) -> None:
        self.started = time.perf_counter()
        self.head: bytes | None = b""
        self.tail = b""
        self.first = 0.0
        self.chunks = 0
        self.chunked = self.said_done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def send(self, body: bytes, path: str) -> asyncio.Future[None]:
        assert self.transport is not None
        self._reset()
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n"
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
        if n and not self.chunks:
            self.first = time.perf_counter()
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
        _, connection = await loop.create_connection(lambda: _Connection(outcome, key), host, port)
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
        _, connection = await loop.create_connection(lambda: _Connection(outcome), host, port)
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
