"""Defines bad clients by name: each sends something to a server and reports its answer."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

MB = 1 << 20
PNG = b"\x89PNG\r\n\x1a\n"
PATH = "/v1/chat/completions"
HEAD = "host: localhost\r\ncontent-type: application/json\r\n"


class Target(Protocol):
    """The server under attack."""

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]: ...

    async def send(self, raw: bytes, *, timeout_s: float = 60.0) -> str:
        """Return the status of the answer, or what happened instead."""


def request(body: bytes, path: str = PATH) -> bytes:
    """Return a POST with this body."""
    return f"POST {path} HTTP/1.1\r\n{HEAD}content-length: {len(body)}\r\n\r\n".encode() + body


def chat(content: Any) -> bytes:
    """Return the body of a chat request with this content."""
    return json.dumps(
        {"model": "bench", "messages": [{"role": "user", "content": content}], "max_tokens": 4}, ensure_ascii=False
    ).encode()


MESSAGE = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f", "arguments": '{"a": 1}'}
CALL = {"role": "assistant", "content": "hi", "tool_calls": [{"id": "x", "type": "function", "function": FUNCTION}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

Abuse = Callable[[Target], Awaitable[list[str]]]
ABUSES: dict[str, Abuse] = {}


def abuse(name: str) -> Callable[[Abuse], Abuse]:
    """Registers it under this name."""

    def register(function: Abuse) -> Abuse:
        ABUSES[name] = function
        return function

    return register


def bodies(name: str, make: Callable[[], bytes], *, path: str = PATH, times: int = 2) -> None:
    """Register the sending of such a body, `times` at once."""

    @abuse(name)
    async def _(target: Target) -> list[str]:
        raw = request(make(), path)
        return list(await asyncio.gather(*(target.send(raw) for _ in range(times))))


@abuse("nothing")
async def nothing(target: Target) -> list[str]:
    """Send nothing: the row to compare with."""
    await asyncio.sleep(3)
    return []


bodies("a text of 31 MB in one body", lambda: chat("x" * 31 * MB), times=1)
bodies("31 MB of escapes", lambda: b'{"model":"bench","zz":"' + b"\\u00e9\\n" * (31 * MB // 8) + b'"}')
bodies("2 M escapes", lambda: b'{"model":"bench","prompt":"' + b"\\u6c34" * 2_000_000 + b'"}', path="/v1/completions")
bodies("a prompt of 1 M words", lambda: chat("water " * 1_000_000), times=1)
bodies(
    "a prompt of 1 M token ids",
    lambda: b'{"model":"bench","max_tokens":4,"prompt":[' + b",".join([b"1234"] * 1_000_000) + b"]}",
    path="/v1/completions",
)
bodies(
    "10 M characters of Chinese",
    lambda: b'{"model":"bench","prompt":"' + "水".encode() * 10_000_000 + b'"}',
    path="/v1/completions",
)
bodies(
    "45000 lists of 25 ids",
    lambda: json.dumps({"model": "bench", "prompt": [[12345] * 25] * 45_000}).encode(),
    path="/v1/completions",
)
bodies("600000 texts", lambda: json.dumps({"model": "bench", "prompt": ["ab"] * 590_000}).encode(), path="/v1/completions")
bodies(
    "a prompt of 4 M tokens in 8 MB, 4 times",
    lambda: chat("a " * (4 * MB)),
    times=4,
)
bodies(
    "a text of 8 MB to be tokenised",
    lambda: json.dumps({"model": "bench", "prompt": "a " * (4 * MB)}).encode(),
    path="/tokenize",
)
bodies("25000 messages", lambda: json.dumps({"model": "bench", "messages": [MESSAGE] * 25_000}).encode())
bodies("8000 calls of tools", lambda: json.dumps({"model": "bench", "messages": [MESSAGE, *[CALL] * 8_000]}).encode())
bodies(
    "25000 messages, Responses",
    lambda: json.dumps({"model": "bench", "input": [MESSAGE] * 25_000, "store": False}).encode(),
    path="/v1/responses",
)
bodies(
    "25000 messages, Anthropic",
    lambda: json.dumps({"model": "bench", "max_tokens": 4, "messages": [MESSAGE] * 25_000}).encode(),
    path="/v1/messages",
)
bodies("8000 tools", lambda: json.dumps({"model": "bench", "messages": [MESSAGE], "tools": [TOOL] * 8_000}).encode())
bodies(
    "90000 logit biases",
    lambda: json.dumps({"model": "bench", "messages": [MESSAGE], "logit_bias": {str(i): 1 for i in range(90_000)}}).encode(),
)
bodies("32 MB of [", lambda: b"[" * (32 * MB - 1))
bodies("1 M objects", lambda: b'{"zz":[' + b",".join([b"{}"] * 1_000_000) + b"]}")
bodies("1 M members", lambda: b"{" + b",".join(b'"k%d":1' % i for i in range(1_000_000)) + b"}")
bodies("99000 lists in one field", lambda: b'{"model":"bench","vllm_xargs":{"a":[' + b",".join([b"[]"] * 49_000) + b"]}}")
bodies("2 M texts of one letter", lambda: b'{"zz":[' + b",".join([b'"a"'] * 2_000_000) + b"]}")
bodies(
    "4 images of 5 MB in one body",
    lambda: chat(
        [
            {
                "type": "image_url",
                "image_url": {"url": "data:image/png;base64," + base64.b64encode(PNG + os.urandom(5 * MB)).decode()},
            }
            for _ in range(4)
        ]
    ),
)


@abuse("a chunk per byte, 200 KB")
async def chunks(target: Target) -> list[str]:
    """Framing that costs more than what it frames."""
    head = f"POST {PATH} HTTP/1.1\r\n{HEAD}transfer-encoding: chunked\r\n\r\n".encode()
    return [await target.send(head + b"1\r\nx\r\n" * 200_000 + b"0\r\n\r\n")]


@abuse("16 image URLs of 10 MB")
async def urls(target: Target) -> list[str]:
    """Name URLs that are fetched from here and are too much together."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (10 * MB) + PNG)
            for _ in range(10):
                writer.write(bytes(MB))
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(play, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        part = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/"}}
        return [await target.send(request(chat([part] * 16)))]


@abuse("500 header floods")
async def headers(target: Target) -> list[str]:
    """Many headers, and large ones that never end."""
    many = b"GET /live HTTP/1.1\r\n" + b"a: b\r\n" * 40_000
    large = b"GET /live HTTP/1.1\r\na: " + b"b" * 300_000
    return list(await asyncio.gather(*(target.send(many if i % 2 else large, timeout_s=20) for i in range(500))))


@abuse("500 URLs of 300 KB")
async def long_urls(target: Target) -> list[str]:
    """Query strings without end."""
    raw = b"GET /live?" + b"a" * 300_000 + b" HTTP/1.1\r\n\r\n"
    return list(await asyncio.gather(*(target.send(raw, timeout_s=20) for _ in range(500))))


@abuse("50 times 20000 pipelined requests")
async def pipelined(target: Target) -> list[str]:
    """As many requests as fit into a read."""
    raw = f"GET /live HTTP/1.1\r\n{HEAD}\r\n".encode() * 20_000
    return list(await asyncio.gather(*(target.send(raw, timeout_s=20) for _ in range(50))))


async def crowd(target: Target, size: int, first: bytes, drip: bytes, seconds: float) -> list[str]:
    """Connections that send `first`, and `drip` every second."""
    held: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        for i in range(size):
            held.append(await target.connect())
            held[-1][1].write(first)
            if i % 100 == 0:
                await asyncio.sleep(0.01)
    except OSError as error:
        print(f"{len(held)} of {size} connections: {error}", file=sys.stderr)
    until = time.monotonic() + seconds
    while drip and time.monotonic() < until:
        for _, writer in held:
            if not writer.transport.is_closing():
                writer.write(drip)
        await asyncio.sleep(1)
    await asyncio.sleep(max(0.0, until - time.monotonic()))
    states = ["closed" if writer.transport.is_closing() or reader.at_eof() else "open" for reader, writer in held]
    for _, writer in held:
        writer.transport.abort()
    await asyncio.sleep(1)
    return states


@abuse("4000 idle connections")
async def idle(target: Target) -> list[str]:
    """Open connections and say nothing."""
    return await crowd(target, 4000, b"", b"", 8)


@abuse("8000 idle connections, more than the limit")
async def too_many(target: Target) -> list[str]:
    """Open more connections than the limit and say nothing."""
    return await crowd(target, 8000, b"", b"", 3)


@abuse("2000 headers that drip in")
async def slow_headers(target: Target) -> list[str]:
    """Send one more header per second."""
    return await crowd(target, 2000, b"GET /live HTTP/1.1\r\n", b"a: b\r\n", 9)


@abuse("1000 bodies that drip in")
async def slow_bodies(target: Target) -> list[str]:
    """Send one more byte per second; the server gives up after half a minute."""
    head = f"POST {PATH} HTTP/1.1\r\n{HEAD}content-length: 1000\r\n\r\n".encode()
    return await crowd(target, 1000, head, b" ", 6)
