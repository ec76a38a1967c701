"""A server of streamed chats whose answers a test chooses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from headrace.tools.bench.load import Target

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"sea"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def streamed(tokens: int) -> bytes:
    events = ROLE + TOKEN * tokens + DONE
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(events), events)


REFUSED = b'HTTP/1.1 429 Too Many Requests\r\nContent-Length: 17\r\n\r\n{"error": "full"}'


class Asked:
    """What came: the requests, and on how many connections."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[bytes] = []
        self.connections = 0


@asynccontextmanager
async def serving(answer: Callable[[int], bytes], *, takes_s: float = 0.0) -> AsyncIterator[tuple[Target, Asked]]:
    """Answer the n-th request with `answer(n)`."""
    asked = Asked()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                asked.heads.append(head)
                asked.bodies.append(json.loads(await reader.readexactly(size)))
                number = len(asked.bodies)
                await asyncio.sleep(takes_s)
                writer.write(answer(number))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Target("127.0.0.1", server.sockets[0].getsockname()[1], "m"), asked
