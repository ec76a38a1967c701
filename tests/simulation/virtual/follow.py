"""Following a stream of the simulated server: `ports.Follow`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from headrace.jetstream.errors import JetStreamError, StreamTrimmed
from headrace.jetstream.ports import MessageBatch, StoredMessage

if TYPE_CHECKING:
    from tests.simulation.virtual.messaging import SimMessaging

RETRY_S = 0.1
LOOK_AGAIN_S = 0.5  # the real one is told by a heartbeat that it has missed something


class SimFollow:
    """Asks for what comes next, and asks again when the server says that something has come."""

    def __init__(self, messaging: SimMessaging, stream: str, subject: str, start_seq: int, batch: int) -> None:
        self._messaging = messaging
        self._stream = stream
        self._subject = subject
        self._batch = batch
        self._position = max(0, start_seq - 1)
        self._wake = asyncio.Event()
        self._checked = -1  # epoch of the connection for which the stream's first message was looked at

    @property
    def position(self) -> int:
        return self._position

    async def next(self) -> MessageBatch:
        server = self._messaging.server
        tails = server.stream(self._stream).tails
        tails.append(self._tail)
        try:
            while True:
                self._wake.clear()
                try:
                    found, pending = await self._messaging.ask(self._stream, "", self._read)
                except StreamTrimmed:
                    raise
                except JetStreamError:
                    await asyncio.sleep(RETRY_S)
                    continue
                if found:
                    self._position = found[-1].seq
                    return MessageBatch(found, self._position, pending)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN_S):
                        await self._wake.wait()
        finally:
            tails.remove(self._tail)

    async def close(self) -> None:
        return None

    def _read(self) -> tuple[list[StoredMessage], int]:
        stream = self._messaging.server.stream(self._stream)
        epoch = self._messaging.conn.epoch
        if epoch != self._checked:
            state = stream.state("")
            if state.first_seq > self._position + 1 or state.last_seq < self._position:
                raise StreamTrimmed(f"{self._stream} begins at {state.first_seq}", wanted=self._position + 1)
            self._checked = epoch
        found = stream.after(self._subject, self._position, self._batch + 1)
        return found[: self._batch], len(found) - len(found[: self._batch])

    def _tail(self) -> None:
        messaging = self._messaging
        messaging.network.down(messaging.conn, self._stream, "", self._wake.set)
