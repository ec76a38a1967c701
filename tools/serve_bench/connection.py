"""Speaks HTTP to a server for a client that streams answers, cheaply enough to load a server from one process.

It speaks HTTP/1.1 on a raw asyncio protocol, because a general client would cost more CPU than the server under test: on two
cores that would measure the client.  What it counts, it parses from the bytes that came: a token chunk is an SSE event whose
delta has content, whatever else it has, and a request counts only if its status was 200 and its stream ended with `[DONE]`.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

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
