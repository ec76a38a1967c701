"""A local web server that plays what a test says, and media items that are just long enough to be told apart."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 40
GIF = b"GIF89a" + b"\0" * 40
WAV = b"RIFF\x24\0\0\0WAVEfmt " + b"\0" * 40
MP4 = b"\0\0\0\x18ftypisom" + b"\0" * 40

Play = Callable[[str, asyncio.StreamWriter], Awaitable[None]]
"""(path, where to write the answer)"""


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def answer(body: bytes = PNG, *headers: str, status: str = "200 OK") -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


class WebServer:
    """`heads` are the requests it got."""

    def __init__(self, play: Play | bytes) -> None:
        self._play = play
        self.heads: list[str] = []
        self.port = 0
        self.open = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.closing = False
        self.most_open = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            if isinstance(self._play, bytes):
                writer.write(self._play)
            else:
                await self._play(head.split(" ")[1], writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            if self.closing:
                writer.transport.abort()
            else:
                writer.close()


@contextlib.asynccontextmanager
async def web_server(play: Play | bytes) -> AsyncIterator[WebServer]:
    web = WebServer(play)
    server = await asyncio.start_server(web.serve, "127.0.0.1", 0)
    web.port = server.sockets[0].getsockname()[1]
    async with server:
        try:
            yield web
        finally:  # a server waits for its handlers when it is closed, from Python 3.12 on
            server.close()
            web.closing = True
            for task in web.tasks:
                task.cancel()
            await asyncio.gather(*web.tasks, return_exceptions=True)


def names(table: dict[str, Sequence[str]]) -> Callable[[str, int], Awaitable[Sequence[str]]]:
    """A resolver that knows these names."""

    async def resolve(host: str, port: int) -> Sequence[str]:
        if host not in table:
            raise OSError(host)
        return table[host]

    return resolve
