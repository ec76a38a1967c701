"""Defines the messages between a worker and its SGLang child process, and starts and stops that process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import sys
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

import msgspec

from headrace.workers.engine import Capabilities, EngineConfig, EngineInfo, Load, Output, PoolItem, Sequence
from headrace.workers.errors import (
    EngineDead,
    EngineError,
    EngineOverloaded,
    EngineStartFailed,
    RequestInvalid,
    UnsupportedByEngine,
)

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


_COMMAND = ("-P", "-m", "headrace.workers.sglang.child")


class ChildProcess:
    """The child process of one engine, seen by the worker: calls with replies, outputs, load reports, and its end."""

    def __init__(self, on_outputs: Callable[[list[Output]], None], on_end: Callable[[str], None]) -> None:
        """`on_outputs` gets all outputs of an engine step, `on_end` why the child has ended without having been told to."""
        self._on_outputs = on_outputs
        self._on_end = on_end
        self._process: asyncio.subprocess.Process | None = None
        self._frames: Frames[ToWorker] | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._reading: asyncio.Task[None] | None = None
        self._stopping = False
        self.load = Load()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self, order: Start, environ: dict[str, str]) -> Started:
        """Start the process and wait until its engine can serve. Raises EngineStartFailed."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *_COMMAND,
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=2,  # whatever SGLang prints belongs to the log
                    env=environ,
                    pass_fds=(theirs.fileno(),),
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours)
        self._frames = Frames(reader, writer, ToWorker)
        self._frames.send(order)
        answer = await self._frames.receive()
        if isinstance(answer, ChildStartFailed):
            raise EngineStartFailed(answer.message)
        if not isinstance(answer, Started):
            code = await self._process.wait()
            raise EngineStartFailed(f"SGLang's process ended while it started (exit code {code}); its own log lines say why")
        self._reading = asyncio.create_task(self._read())
        return answer

    async def call(self, make: Callable[[int], Any]) -> Any:
        """Send the message that `make` builds with the call's number, and return the value of its reply.

        Raises the typed error of the reply, or EngineDead.
        """
        number = next(self._numbers)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = reply
        try:
            self.send(make(number))
            return await reply
        finally:
            self._calls.pop(number, None)

    def send(self, message: Any) -> None:
        """Send a message that has no reply. Raises EngineDead."""
        if self._frames is None or self._reading is None or self._reading.done():
            raise EngineDead("SGLang's process is gone")
        self._frames.send(message)

    async def stop(self, grace_s: float) -> None:
        """Ask the process to end its engine, and kill it if it has not ended within `grace_s`."""
        self._stopping = True
        process, frames = self._process, self._frames
        if process is None:
            return
        if frames is not None:
            frames.send(Stop())
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            if self._reading is not None:
                self._reading.cancel()
            if frames is not None:
                frames.close()

    async def _read(self) -> None:
        frames = self._frames
        assert frames is not None  # noqa: S101 # it is set before this task is made
        reason = "SGLang's process is gone; its own log lines say why"
        try:
            while (message := await frames.receive()) is not None:
                self._take(message)
        except FrameBroken as error:
            reason = str(error)
        finally:
            self._end(reason)

    def _take(self, message: Any) -> None:
        match message:
            case StepOutputs():
                self.load = message.load
                self._on_outputs(message.outputs)
            case LoadReport():
                self.load = message.load
            case Reply():
                self._settle(message)
            case _:
                raise FrameBroken(f"SGLang's process sent {type(message).__name__} while it served")

    def _settle(self, reply: Reply) -> None:
        waiting = self._calls.get(reply.call)
        if waiting is None or waiting.done():
            return
        if reply.error is None:
            waiting.set_result(reply.value)
        else:
            waiting.set_exception(translated(reply.error))

    def _end(self, reason: str) -> None:
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(EngineDead(reason))
        if not self._stopping:
            self._on_end(reason)


def translated(error: Error) -> EngineError | UnsupportedByEngine:
    match error.kind:
        case "invalid":
            return RequestInvalid(error.message, param=error.param)
        case "unsupported":
            return UnsupportedByEngine(error.message, param=error.param)
        case "overloaded":
            return EngineOverloaded(error.message)
        case _:
            return EngineError(error.message)
