"""Frames messages on a byte stream: four bytes of length, big endian, then msgpack."""

from __future__ import annotations

import asyncio
from typing import Any, Generic, TypeVar

import msgspec

from headrace.workers.errors import EngineError

LARGEST = 256 << 20  # bytes; the prompt of a request or the outputs of a step have far fewer
_LENGTH = 4

Received = TypeVar("Received")


class FrameBroken(EngineError):
    """The other side sent something that is no frame of this protocol."""


class Frames(Generic[Received]):
    """The frames of one connection. `received` is the union of the messages that the other side sends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)
        self._encoder = msgspec.msgpack.Encoder()

    async def receive(self) -> Received | None:
        """Return the next message, None at the end of the stream. Raises FrameBroken."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH), "big")
            if length > LARGEST:
                raise FrameBroken(f"a frame of {length} bytes was announced; {LARGEST} are possible")
            body = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise FrameBroken(f"a frame could not be read: {error}") from error

    def send(self, message: msgspec.Struct) -> None:
        """Write a message. Does nothing on a connection that is closed: its reader learns of the end."""
        if self._writer.is_closing():
            return
        body = self._encoder.encode(message)
        if len(body) > LARGEST:
            raise FrameBroken(f"a message of {len(body)} bytes does not fit into a frame of {LARGEST}")
        self._writer.write(len(body).to_bytes(_LENGTH, "big") + body)

    async def flush(self) -> None:
        """Wait until the other side has room. Raises ConnectionError when it is gone."""
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()
