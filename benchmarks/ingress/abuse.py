"""Measures the HTTP surface under bad clients: the longest block of its event loop, its memory, and delays of others.

A server in a process of its own (uvicorn, uvloop, this package, a fake ingress that answers at once) is attacked from this one,
in one way after the other, while a polite client asks for a short answer twenty times a second.  In the server a coroutine
wakes every millisecond: the longest gap between two wakings is how long the loop was blocked, by its own work, by a thread that
held the interpreter, or by other programs on the machine.  Two more columns tell which, also on a machine that is busy with
other things.  `process` counts of each gap no more than the CPU time that all threads of the server used in it: what a machine
with nothing else to do would see, or more, where threads computed beside the loop without holding it up.  `loop` counts no more
than the CPU time of the loop's own thread, for which no other process is to blame.

    python -m benchmarks.ingress.abuse [--only NAME …] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.ingress.abuses import ABUSES, chat, request

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Server:
    """The server under attack (`benchmarks.ingress.abused_server`)."""

    port: int
    process: asyncio.subprocess.Process

    async def ask(self, line: str) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line.encode() + b"\n")
        answer: dict[str, float] = json.loads(await self.process.stdout.readline())
        return answer

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def send(self, raw: bytes, *, timeout_s: float = 60.0) -> str:
        """Return the status of the answer, or what happened instead."""
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await self.connect()
                try:
                    writer.write(raw)
                    line = await reader.readline()
                finally:
                    writer.transport.abort()
        except TimeoutError:
            return "open"
        except ConnectionError:
            return "closed"
        return line.split(b" ")[1].decode() if line else "closed"


async def polite(target: Server, waits: list[float]) -> None:
    """Send a short request twenty times a second."""
    raw = request(chat("How are you?"))
    while True:
        began = time.perf_counter()
        if await target.send(raw) == "200":
            waits.append(time.perf_counter() - began)
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def server() -> AsyncIterator[Server]:
    """Run a server in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.ingress.abused_server",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        yield Server(json.loads(await process.stdout.readline())["port"], process)
    finally:
        process.kill()
        await process.wait()


async def measure(target: Server, name: str) -> None:
    """Print one row."""
    for _ in range(3):
        await target.send(request(chat("hello")))
    before = await target.ask("reset")
    waits: list[float] = []
    async with asyncio.TaskGroup() as group:
        others = group.create_task(polite(target, waits))
        outcome = await ABUSES[name](target)
        during = await target.ask("report")
        others.cancel()
    await asyncio.sleep(1)
    after = await target.ask("report")
    counts = ", ".join(f"{outcome.count(state)} x {state}" for state in sorted(set(outcome)))
    print(
        f"| {name} | {counts} | {during['wall_ms']:.0f} | {during['cpu_ms']:.0f} "
        f"| {during['loop_ms']:.0f} | {max(waits, default=0) * 1000:.0f} "
        f"| {before['rss_mb']:.0f} | {during['peak_mb']:.0f} | {after['rss_mb']:.0f} |",
        flush=True,
    )


async def attack(names: list[str], rounds: int) -> None:
    """Print the table."""
    print(
        "| abuse | answers | blocked (ms) | process (ms) | loop (ms) | others waited (ms) | RSS before | peak | after (MiB) |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in names:
        for _ in range(rounds):
            async with server() as target:
                await measure(target, name)


def main() -> None:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(ABUSES))
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(attack(args.only or list(ABUSES), args.rounds))


if __name__ == "__main__":
    main()
