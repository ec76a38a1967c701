"""A network link that can be cut or made slow: what stands between one part and the NATS server.

A cut link loses no bytes and closes no connection, it just carries nothing, as a partition does that TCP outlasts.  A slow one
carries everything late, both ways: answers to a refreshed lease too, so that its owner has to count from when it asked.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self

_CHUNK = 64 * 1024
_MOST_LATE = 256  # chunks that are under way on a slow link, each way of each connection
_CONNECT_TIMEOUT_S = 2.0

_END = b""

Late = tuple[float, bytes]
"""When it is due, and the bytes."""


class NetworkProxy:
    """`async with` listens on a port of its own and passes connections on to `host:port`."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._open = asyncio.Event()
        self._open.set()
        self._late_s = 0.0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, self._to[0], 0)
        return self

    async def __aexit__(self, *_raised: object) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def url(self) -> str:
        """What to give a NATS client."""
        if self._server is None:
            raise RuntimeError("the link is not open")
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"nats://{host}:{port}"

    def cut(self) -> None:
        """Carry nothing until `mend`."""
        self._open.clear()

    def slow(self, late_s: float) -> None:
        """Carry everything this much later."""
        self._late_s = late_s

    def mend(self) -> None:
        self._late_s = 0.0
        self._open.set()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: asyncio looks at the outcome of its own ones as if they could not be cancelled.
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                there = await asyncio.open_connection(*self._to)
        except (OSError, TimeoutError):
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            return
        away, back = (asyncio.Queue[Late](_MOST_LATE) for _ in range(2))
        ways = ((reader, away, there[1]), (there[0], back, writer))
        tasks = [asyncio.create_task(self._take(source, queue)) for source, queue, _ in ways]
        tasks += [asyncio.create_task(self._deliver(queue, sink)) for _, queue, sink in ways]
        try:
            await asyncio.wait(tasks[2:], return_when=asyncio.FIRST_COMPLETED)
        finally:
            writer.close()  # before anything that can be cancelled
            there[1].close()
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(writer.wait_closed(), there[1].wait_closed(), return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, queue: asyncio.Queue[Late]) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while chunk := await reader.read(_CHUNK):
                await queue.put((loop.time() + self._late_s, chunk))
        await queue.put((0.0, _END))

    async def _deliver(self, queue: asyncio.Queue[Late], writer: asyncio.StreamWriter) -> None:
        """Returns when the source has ended, or nobody takes any more."""
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while True:
                due_s, chunk = await queue.get()
                if chunk == _END:
                    return
                if (wait_s := due_s - loop.time()) > 0:
                    await asyncio.sleep(wait_s)
                await self._open.wait()
                writer.write(chunk)
                await writer.drain()
