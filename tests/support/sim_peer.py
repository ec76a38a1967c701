"""A simulated engine in a process of its own, driven over a pipe: `Peer` here, `serve` there."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import msgspec

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import EngineConfig, EngineInfo, Handover, Load, Output, Role, Sequence
from headrace.workers.sim.engine import SimEngine

_CALL_S = 30.0


def sequence(
    name: str,
    tokens: list[int],
    *,
    max_tokens: int = 10,
    handover: Handover | None = None,
    sim: Mapping[str, Any] | None = None,
) -> Sequence:
    """`sim`: faults of this sequence."""
    return Sequence(
        id=name,
        token_ids=tokens,
        prompt_tokens=len(tokens),
        sampling=Sampling(max_tokens=max_tokens),
        handover=handover,
        extra={"sim": dict(sim)} if sim else {},
    )


class Seen:
    """What came out of an engine, by sequence."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[Output]] = {}
        self._changed = asyncio.Event()

    def sink(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.id, []).append(output)
        self._changed.set()

    def ids(self, name: str) -> list[int]:
        return [token for output in self.outputs.get(name, []) for token in output.ids]

    async def end(self, name: str) -> Output:
        """The last output of a sequence."""
        async with asyncio.timeout(_CALL_S):
            while not (given := self.outputs.get(name)) or not (given[-1].finish or given[-1].fault):
                self._changed.clear()
                await self._changed.wait()
        return given[-1]


class Peer(Seen):
    """The engine protocol's calls, made in the other process. Get one with `hire`, and `leave` it in the end."""

    _spare: ClassVar[list[Peer]] = []  # processes take a second to start, so they serve many tests

    def __init__(self) -> None:
        super().__init__()
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        self.process = context.Process(target=serve, args=(far,), daemon=True)
        self.process.start()
        far.close()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._calls = 0
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, daemon=True).start()

    @classmethod
    def hire(cls) -> Peer:
        """A process for this test."""
        if not cls._spare:
            return cls()
        peer = cls._spare.pop()
        Seen.__init__(peer)
        peer._loop = asyncio.get_running_loop()
        return peer

    async def leave(self) -> None:
        if self.process.is_alive():
            self.thaw()
            await self.call("stop", 1.0)
            self._spare.append(self)
        else:
            self._pipe.close()

    def _read(self) -> None:
        while True:
            try:
                number, result = self._pipe.recv()
                self._loop.call_soon_threadsafe(self._take, number, result)
            except (EOFError, OSError, RuntimeError):  # the process or the test is over
                return

    def _take(self, number: int, result: Any) -> None:
        if number == 0:
            self.sink(msgspec.msgpack.decode(result, type=list[Output]))
        elif not (answer := self._answers.pop(number)).done():
            answer.set_exception(result) if isinstance(result, Exception) else answer.set_result(result)

    async def call(self, name: str, *args: Any) -> Any:
        """Call this method of the engine there."""
        self._calls += 1
        answer = self._answers[self._calls] = self._loop.create_future()
        self._pipe.send((self._calls, name, args))
        return await asyncio.wait_for(answer, _CALL_S)

    async def start(self, role: Role, **args: Any) -> EngineInfo:
        info: EngineInfo = await self.call("start", config(role, args))
        return info

    async def submit(self, item: Sequence) -> None:
        await self.call("submit", item)

    async def used(self) -> int:
        load: Load = await self.call("load")
        return load.blocks_used

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def freeze(self) -> None:
        """Stop the process where it is; `thaw` lets it go on."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)


def config(role: Role, args: Mapping[str, Any]) -> EngineConfig:
    return EngineConfig(model="sim", served_name="sim", role=role, args=args)


def serve(pipe: Connection) -> None:
    """The other process: one engine."""
    asyncio.run(_serve(pipe))


async def _serve(pipe: Connection) -> None:
    engine = SimEngine()
    loop = asyncio.get_running_loop()
    calls: asyncio.Queue[tuple[int, str, tuple[Any, ...]] | None] = asyncio.Queue()

    def read() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                loop.call_soon_threadsafe(calls.put_nowait, pipe.recv())
        loop.call_soon_threadsafe(calls.put_nowait, None)

    def sink(outputs: list[Output]) -> None:
        pipe.send((0, msgspec.msgpack.encode(outputs)))

    threading.Thread(target=read, daemon=True).start()
    while (call := await calls.get()) is not None:
        number, name, args = call
        try:
            if name == "start":
                engine = SimEngine()
                args = (*args, sink)
            result = getattr(engine, name)(*args)
            if asyncio.iscoroutine(result):
                result = await result
        except Exception as error:
            result = error
        pipe.send((number, result))
    await engine.stop(1.0)
