"""Defines the messages between a worker and its SGLang child process."""

from __future__ import annotations

import asyncio
from typing import Any, Generic, Literal, TypeVar

import msgspec

from headrace.workers.engine import Capabilities, EngineConfig, EngineInfo, Load, Output, PoolItem, Sequence
from headrace.workers.errors import EngineError

# Frames messages on a byte stream: four bytes of length, big endian, then msgpack.

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


ErrorKind = Literal["invalid", "unsupported", "overloaded", "failed"]


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first message to the child. `kv_events` are SGLang's settings for publishing its KV events."""

    config: EngineConfig
    kv_events: dict[str, Any] | None = None


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A sequence to run. Answered by `Reply`."""

    call: int
    sequence: Sequence


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Sequences and inputs to stop. Not answered."""

    ids: list[str]


class PoolInput(msgspec.Struct, frozen=True, tag="pool"):
    """An input to compute a vector for. Answered by `Reply` with the vector and its cached tokens."""

    call: int
    item: PoolItem


class Control(msgspec.Struct, frozen=True, tag="control"):
    """An operation of `Engine.control`. Answered by `Reply`."""

    call: int
    operation: str
    args: dict[str, Any]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The last message to the child, which ends its processes and itself."""


ToChild = Start | Submit | Abort | PoolInput | Control | Stop


class Started(msgspec.Struct, frozen=True, tag="started"):
    info: EngineInfo
    capabilities: Capabilities


class ChildStartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The engine cannot be started. The child ends."""

    message: str


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    """All outputs of an engine step, and the load after it."""

    outputs: list[Output]
    load: Load


class LoadReport(msgspec.Struct, frozen=True, tag="load"):
    """The load between steps."""

    load: Load


class Error(msgspec.Struct, frozen=True):
    """A failed call: `invalid` is the request's fault, `overloaded` may succeed on another worker."""

    kind: ErrorKind
    message: str
    param: str | None = None


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    call: int
    value: Any = None
    error: Error | None = None


ToWorker = Started | ChildStartFailed | StepOutputs | LoadReport | Reply
