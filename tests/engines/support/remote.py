"""An engine in a process of its own, used through the engine protocol: `async with RemoteEngine(config) as engine: …`.

The process is started with the path of a Unix socket and talks to its parent over it: calls with a number one way, answers and
outputs with their times the other way, each a pickle behind its length.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import structlog

from headrace.workers import engine_registry
from headrace.workers.engine import Capabilities, EngineConfig, EngineInfo, Load, Output, Role, Sequence
from headrace.workers.process_guard import TreeGuard

ROOT = Path(__file__).parents[3]
START_S = 240.0
CALL_S = 120.0
STEP_S = 60.0  # longest wait for the end of a sequence


class RemoteEngine:
    """The parent's end. Outputs are kept with the monotonic time at which the engine's own process got them."""

    def __init__(self, config: EngineConfig, *, engine: str = "vllm", environ: Mapping[str, str] | None = None) -> None:
        self._config = config
        self._engine = engine
        self._environ = dict(environ or {})
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-engine-")
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._server: asyncio.Server | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self._submitted: dict[str, float] = {}
        self.outputs: dict[str, list[tuple[float, Output]]] = {}
        self._ended: dict[str, asyncio.Event] = {}
        self.info: EngineInfo | None = None
        self.started_s = 0.0

    async def __aenter__(self) -> Self:
        path = Path(self._folder.name) / "s"
        self._server = await asyncio.start_unix_server(self._meet, path)
        begun = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.engines.support.remote", str(path), self._engine),
            cwd=ROOT,
            env=os.environ | self._environ,
            stdout=sys.stderr,
        )
        try:
            async with asyncio.timeout(START_S):
                await self._connected.wait()
                self.info = await self._call("start", self._config, within_s=START_S)
        except BaseException:
            await self.kill()
            raise
        self.started_s = time.monotonic() - begun
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(Exception):
                await self._call("stop", 2.0, within_s=20.0)
        await self.kill()

    async def kill(self) -> None:
        """Kill the process and its engine as a crash would."""
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        if self._writer is not None:
            self._writer.close()
        if self._server is not None:
            self._server.close()
        self._folder.cleanup()

    async def submit(self, sequence: Sequence) -> None:
        self.outputs[sequence.id] = []
        self._ended[sequence.id] = asyncio.Event()
        self._submitted[sequence.id] = time.monotonic()
        await self._call("submit", sequence)

    async def end(self, sequence_id: str, within_s: float = STEP_S) -> list[Output]:
        """All outputs of a sequence, once it has ended."""
        async with asyncio.timeout(within_s):
            await self._ended[sequence_id].wait()
        return [output for _, output in self.outputs[sequence_id]]

    async def run(self, sequence: Sequence) -> list[Output]:
        await self.submit(sequence)
        return await self.end(sequence.id)

    def first_output_s(self, sequence_id: str) -> float:
        """From the call of submit here to the first output there."""
        return self.outputs[sequence_id][0][0] - self._submitted[sequence_id]

    async def abort(self, ids: Seq[str]) -> None:
        await self._call("abort", ids)

    async def release(self, sequence_id: str, params: Mapping[str, Any] | None) -> None:
        await self._call("release", sequence_id, params)

    async def set_role(self, role: Role) -> None:
        await self._call("set_role", role)

    async def control(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        result: Mapping[str, Any] = await self._call("control", op, args)
        return result

    async def encode(self, item: Mapping[str, Any]) -> bytes:
        record: bytes = await self._call("encode", item)
        return record

    async def load(self) -> Load:
        result: Load = await self._call("load")
        return result

    async def capabilities(self) -> Capabilities:
        result: Capabilities = await self._call("capabilities")
        return result

    async def until_blocks_used(self, blocks: int, within_s: float = 15.0) -> None:
        """Wait until so many blocks are taken. Raises AssertionError with what is taken instead."""
        until = time.monotonic() + within_s
        while (used := (await self.load()).blocks_used) != blocks:
            assert time.monotonic() < until, f"{used} blocks are taken, not {blocks}"
            await asyncio.sleep(0.02)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._reading = asyncio.current_task()
        self._connected.set()
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                number, kind, value = await receive(reader)
                if number is None:
                    self._take(kind, value)
                elif kind == "error":
                    self._answers.pop(number).set_exception(value)
                else:
                    self._answers.pop(number).set_result(value)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the engine's process is gone"))

    def _take(self, when: float, outputs: list[Output]) -> None:
        for output in outputs:
            self.outputs[output.id].append((when, output))
            if output.finish or output.fault:
                self._ended[output.id].set()

    async def _call(self, method: str, *args: Any, within_s: float = CALL_S) -> Any:
        assert self._writer is not None
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        send(self._writer, (number, method, args))
        async with asyncio.timeout(within_s):
            return await answer


def send(writer: asyncio.StreamWriter, message: Any) -> None:
    packed = pickle.dumps(message)
    writer.write(len(packed).to_bytes(4, "big") + packed)


async def receive(reader: asyncio.StreamReader) -> Any:
    length = int.from_bytes(await reader.readexactly(4), "big")
    return pickle.loads(await reader.readexactly(length))  # noqa: S301  # of a process that the test has started


async def serve(path: str, engine_name: str) -> None:
    """The child: run the engine and do what the parent says, until that is gone."""
    engine = engine_registry.create(engine_name)
    reader, writer = await asyncio.open_unix_connection(path)

    def sink(outputs: list[Output]) -> None:
        send(writer, (None, time.monotonic(), outputs))

    async def answer(number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            if method == "start":
                value: Any = await engine.start(args[0], sink)
            elif method == "capabilities":
                value = engine.capabilities
            elif method == "load":
                value = engine.load()
            else:
                value = await getattr(engine, method)(*args)
        except Exception as error:
            send(writer, (number, "error", error))
        else:
            send(writer, (number, "value", value))

    async with asyncio.TaskGroup() as calls:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                calls.create_task(answer(*await receive(reader)))
        os._exit(0)  # the parent is gone: the guard ends whatever the engine has started


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    guard = TreeGuard()
    guard.start()
    asyncio.run(serve(sys.argv[1], sys.argv[2]))
