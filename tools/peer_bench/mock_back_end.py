"""An OpenAI server without a model, for gateways to stand before: it streams as many tokens as are asked for, all at once.

    python -m headrace.tools.peer_bench.mock_back_end PORT

It answers any GET with its one model, and a POST with a streamed chat, cheaply enough to be no bottleneck.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys

import uvloop

MODEL = "sim"
TOKEN = "word "  # noqa: S105  # of an answer, no secret
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)')
_STREAM = re.compile(rb'"stream": ?true')
_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


def _event(delta: dict[str, str], finish: str | None = None) -> bytes:
    told = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return b"data: %b\n\n" % json.dumps({**told, "choices": [choice]}, separators=(",", ":")).encode()


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def _whole(told: object, status: str = "200 OK") -> bytes:
    body = json.dumps(told).encode()
    return b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
_FIRST = _chunk(_event({"role": "assistant", "content": ""}))
_ONE = _chunk(_event({"content": TOKEN}))
_LAST = _chunk(_event({}, "length")) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
MODELS = _whole({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "mock"}]})


def answer(body: bytes) -> bytes:
    """Return the answer to a chat, each token an event and a chunk of its own."""
    found = _TOKENS.search(body)
    tokens = int(found.group(1)) if found is not None else 16
    if _STREAM.search(body):
        return _HEAD + _FIRST + _ONE * tokens + _LAST
    message = {"role": "assistant", "content": TOKEN * tokens}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    told = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [choice]}
    return _whole({**told, "usage": _USAGE})


class MockConnection(asyncio.Protocol):
    """A connection of a client, which may keep it for many requests."""

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._buffer, 0, end + 2)
            size = int(length.group(1)) if length is not None else 0
            if len(self._buffer) < end + 4 + size:
                return
            body = self._buffer[end + 4 : end + 4 + size]
            self._transport.write(answer(body) if self._buffer.startswith(b"POST") else MODELS)
            self._buffer = self._buffer[end + 4 + size :]


async def serve(port: int) -> asyncio.Server:
    """Listen on 127.0.0.1."""
    return await asyncio.get_running_loop().create_server(MockConnection, "127.0.0.1", port)


async def _forever(port: int) -> None:
    async with await serve(port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_forever(int(sys.argv[1])))
