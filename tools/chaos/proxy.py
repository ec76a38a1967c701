"""Relays the connections between a process and the NATS server over a link that can be cut or slowed down.

A cut link loses no bytes and closes no connection; it carries nothing, as a partition that TCP outlasts. A slow link delays
everything in both directions, also the replies to lease refreshes, so that a lease's owner has to count from the request.
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
"""The time at which the bytes are due, and the bytes."""


class NetworkProxy:
    """Listens on a port of its own while entered, and relays connections to `host:port`."""

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
        """Return the URL of this link for a NATS client. Raises RuntimeError if the link is not open."""
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
        """Write each chunk when it is due. Returns when the source has ended or the receiver has closed."""
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
