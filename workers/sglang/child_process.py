"""Starts SGLang's child process and talks to it: calls with replies, outputs, load reports, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import sys
from collections.abc import Callable
from typing import Any, Protocol

from headrace.workers.engine import Load, Output
from headrace.workers.errors import (
    EngineDead,
    EngineError,
    EngineOverloaded,
    EngineStartFailed,
    RequestInvalid,
    UnsupportedByEngine,
)
from headrace.workers.sglang.messages import (
    ChildStartFailed,
    Error,
    FrameBroken,
    Frames,
    LoadReport,
    Reply,
    Start,
    Started,
    StepOutputs,
    Stop,
    ToWorker,
)

_COMMAND = ("-P", "-m", "headrace.workers.sglang.child")


class ChildOwner(Protocol):
    """Receives what a child process tells without being asked. Called on the event loop."""

    def take_outputs(self, outputs: list[Output]) -> None:
        """Take all outputs of an engine step."""

    def child_ended(self, reason: str) -> None:
        """Learn that the child has ended without having been told to."""


class ChildProcess:
    def __init__(self, owner: ChildOwner) -> None:
        self._owner = owner
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
                self._owner.take_outputs(message.outputs)
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
            self._owner.child_ended(reason)


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
