"""What badly behaved clients do to the HTTP surface: the longest block of its event loop, its memory, and what others noticed.

A server in a process of its own (uvicorn, uvloop, this package, a fake ingress that answers at once) is attacked from this one,
in one way after the other, while a polite client asks for a short answer twenty times a second.  In the server a coroutine
wakes every millisecond: the longest gap between two wakings is how long the loop was blocked, by its own work, by a thread that
held the interpreter, or by other programs on the machine.  Two more columns tell which, also on a machine that is busy with
other things.  `process` counts of each gap no more than the CPU time that all threads of the server used in it: what a machine
with nothing else to do would see, or more, where threads computed beside the loop without holding it up.  `loop` counts no more
than the CPU time of the loop's own thread, which it cannot blame on anybody.

    python benchmarks/ingress_abuse.py [--only NAME …] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MB = 1 << 20
PNG = b"\x89PNG\r\n\x1a\n"
PATH = "/v1/chat/completions"
CONTEXT = 1_100_000


# -- the server ----------------------------------------------------------------------------------------------


async def run_server() -> None:
    """Serve on a free port; answer `reset` and `report` on standard input with a line of JSON."""
    from tokenizers import Tokenizer

    from benchmarks.ingress_cost import TEMPLATE, FakeIngress, Models, Served, tokenizer
    from broker.cards import MediaSlot, ModelCard
    from frontend.app import build_frontend
    from frontend.memory import return_large
    from frontend.server import listen, quiet_gc, serve, share_evenly
    from frontend.settings import FrontendSettings

    settings = FrontendSettings(port=0, access_log=False, media_private=True, header_timeout_s=5, drain_grace_s=0)
    known = Tokenizer.from_str(tokenizer().decode())
    known.add_special_tokens(["<|image|>"])
    files = {"tokenizer.json": known.to_str().encode(), "chat_template.jinja": TEMPLATE.encode()}
    ingress = FakeIngress(files, 1)
    slots = {"image": MediaSlot("<|image|>", known.token_to_id("<|image|>"), 64)}
    card = ModelCard(
        model="bench", pool="bench-0", context_length=CONTEXT, block_size=16, vocab_size=2000, media=slots, default_max_tokens=4
    )
    ingress.models = Models(Served(card, files))
    frontend = build_frontend(ingress, settings)
    listener = listen(settings)
    gauge = Gauge()
    quiet_gc()
    share_evenly()
    return_large()

    def announce(url: str) -> None:
        print(json.dumps({"port": int(url.rsplit(":", 1)[1])}), flush=True)

    def command() -> None:
        line = sys.stdin.readline().strip()
        if line == "reset":
            gauge.reset()
        print(json.dumps(gauge.report() | {"refused": _refused(frontend.metrics)}), flush=True)

    asyncio.get_running_loop().add_reader(sys.stdin, command)

    async def drain(grace_s: float) -> None:
        pass

    async with asyncio.TaskGroup() as group:
        ticking = group.create_task(gauge.tick())
        await serve(frontend, settings, listener, drain=drain, on_listening=announce)
        ticking.cancel()


def _refused(metrics: Any) -> float:
    return sum(sample.value for sample in next(iter(metrics.connections_refused.collect())).samples if "_total" in sample.name)


class Gauge:
    """The longest gap between two wakings, and the longest that this process can have made itself, by what it computed."""

    def __init__(self) -> None:
        self.wall = self.cpu = self.loop = 0.0

    async def tick(self) -> None:
        while True:
            wall, cpu, loop = time.perf_counter(), time.process_time(), time.thread_time()
            await asyncio.sleep(0.001)
            blocked = time.perf_counter() - wall - 0.001
            self.wall = max(self.wall, blocked)
            self.cpu = max(self.cpu, min(blocked, time.process_time() - cpu))
            self.loop = max(self.loop, min(blocked, time.thread_time() - loop))

    def reset(self) -> None:
        self.wall = self.cpu = self.loop = 0.0
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the memory counts from here

    def report(self) -> dict[str, float]:
        memory = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        sizes = {key: int(memory[name].split()[0]) / 1024 for key, name in (("rss_mb", "VmRSS"), ("peak_mb", "VmHWM"))}
        return {"wall_ms": self.wall * 1000, "cpu_ms": self.cpu * 1000, "loop_ms": self.loop * 1000, **sizes}


# -- clients -------------------------------------------------------------------------------------------------


@dataclass
class Target:
    """The server under attack."""

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
        """The status of the answer, or what happened instead."""
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


def request(body: bytes, path: str = PATH) -> bytes:
    """A POST with this body."""
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def chat(content: Any) -> bytes:
    """A body of a chat request with this content."""
    return json.dumps(
        {"model": "bench", "messages": [{"role": "user", "content": content}], "max_tokens": 4}, ensure_ascii=False
    ).encode()


MESSAGE = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f", "arguments": '{"a": 1}'}
CALL = {"role": "assistant", "content": "hi", "tool_calls": [{"id": "x", "type": "function", "function": FUNCTION}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

Abuse = Callable[[Target], Awaitable[list[str]]]
ABUSES: dict[str, Abuse] = {}


def abuse(name: str) -> Callable[[Abuse], Abuse]:
    """Registers it under this name."""

    def register(function: Abuse) -> Abuse:
        ABUSES[name] = function
        return function

    return register


def bodies(name: str, make: Callable[[], bytes], *, path: str = PATH, times: int = 2) -> None:
    """Registers the sending of such a body, `times` at once."""

    @abuse(name)
    async def _(target: Target) -> list[str]:
        raw = request(make(), path)
        return list(await asyncio.gather(*(target.send(raw) for _ in range(times))))


@abuse("nothing")
async def nothing(target: Target) -> list[str]:
    """The row to compare with."""
    await asyncio.sleep(3)
    return []


bodies("a text of 31 MB in one body", lambda: chat("x" * 31 * MB), times=1)
bodies("31 MB of escapes", lambda: b'{"model":"bench","zz":"' + b"\\u00e9\\n" * (31 * MB // 8) + b'"}')
bodies("2 M escapes", lambda: b'{"model":"bench","prompt":"' + b"\\u6c34" * 2_000_000 + b'"}', path="/v1/completions")
bodies("a prompt of 1 M words", lambda: chat("water " * 1_000_000), times=1)
bodies(
    "a prompt of 1 M token ids",
    lambda: b'{"model":"bench","max_tokens":4,"prompt":[' + b",".join([b"1234"] * 1_000_000) + b"]}",
    path="/v1/completions",
)
bodies(
    "10 M characters of Chinese",
    lambda: b'{"model":"bench","prompt":"' + "水".encode() * 10_000_000 + b'"}',
    path="/v1/completions",
)
bodies(
    "45000 lists of 25 ids",
    lambda: json.dumps({"model": "bench", "prompt": [[12345] * 25] * 45_000}).encode(),
    path="/v1/completions",
)
bodies("600000 texts", lambda: json.dumps({"model": "bench", "prompt": ["ab"] * 590_000}).encode(), path="/v1/completions")
bodies(
    "a prompt of 4 M tokens in 8 MB, 4 times",
    lambda: chat("a " * (4 * MB)),
    times=4,
)
bodies(
    "a text of 8 MB to be tokenised",
    lambda: json.dumps({"model": "bench", "prompt": "a " * (4 * MB)}).encode(),
    path="/tokenize",
)
bodies("25000 messages", lambda: json.dumps({"model": "bench", "messages": [MESSAGE] * 25_000}).encode())
bodies("8000 calls of tools", lambda: json.dumps({"model": "bench", "messages": [MESSAGE, *[CALL] * 8_000]}).encode())
bodies(
    "25000 messages, Responses",
    lambda: json.dumps({"model": "bench", "input": [MESSAGE] * 25_000, "store": False}).encode(),
    path="/v1/responses",
)
bodies(
    "25000 messages, Anthropic",
    lambda: json.dumps({"model": "bench", "max_tokens": 4, "messages": [MESSAGE] * 25_000}).encode(),
    path="/v1/messages",
)
bodies("8000 tools", lambda: json.dumps({"model": "bench", "messages": [MESSAGE], "tools": [TOOL] * 8_000}).encode())
bodies(
    "90000 logit biases",
    lambda: json.dumps({"model": "bench", "messages": [MESSAGE], "logit_bias": {str(i): 1 for i in range(90_000)}}).encode(),
)
bodies("32 MB of [", lambda: b"[" * (32 * MB - 1))
bodies("1 M objects", lambda: b'{"zz":[' + b",".join([b"{}"] * 1_000_000) + b"]}")
bodies("1 M members", lambda: b"{" + b",".join(b'"k%d":1' % i for i in range(1_000_000)) + b"}")
bodies("99000 lists in one field", lambda: b'{"model":"bench","vllm_xargs":{"a":[' + b",".join([b"[]"] * 49_000) + b"]}}")
bodies("2 M texts of one letter", lambda: b'{"zz":[' + b",".join([b'"a"'] * 2_000_000) + b"]}")
bodies(
    "4 images of 5 MB in one body",
    lambda: chat(
        [
            {
                "type": "image_url",
                "image_url": {"url": "data:image/png;base64," + base64.b64encode(PNG + os.urandom(5 * MB)).decode()},
            }
            for _ in range(4)
        ]
    ),
)


@abuse("a chunk per byte, 200 KB")
async def chunks(target: Target) -> list[str]:
    """Framing that costs more than what it frames."""
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    return [await target.send(head + b"1\r\nx\r\n" * 200_000 + b"0\r\n\r\n")]


@abuse("16 image URLs of 10 MB")
async def urls(target: Target) -> list[str]:
    """They are fetched from here; together they are too much."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (10 * MB) + PNG)
            for _ in range(10):
                writer.write(bytes(MB))
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(play, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        part = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/"}}
        return [await target.send(request(chat([part] * 16)))]


@abuse("500 header floods")
async def headers(target: Target) -> list[str]:
    """Many headers, and large ones that never end."""
    many = b"GET /live HTTP/1.1\r\n" + b"a: b\r\n" * 40_000
    large = b"GET /live HTTP/1.1\r\na: " + b"b" * 300_000
    return list(await asyncio.gather(*(target.send(many if i % 2 else large, timeout_s=20) for i in range(500))))


@abuse("500 URLs of 300 KB")
async def long_urls(target: Target) -> list[str]:
    """Query strings without end."""
    raw = b"GET /live?" + b"a" * 300_000 + b" HTTP/1.1\r\n\r\n"
    return list(await asyncio.gather(*(target.send(raw, timeout_s=20) for _ in range(500))))


@abuse("50 times 20000 pipelined requests")
async def pipelined(target: Target) -> list[str]:
    """As many requests as fit into a read."""
    raw = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n" * 20_000
    return list(await asyncio.gather(*(target.send(raw, timeout_s=20) for _ in range(50))))


async def crowd(target: Target, size: int, first: bytes, drip: bytes, seconds: float) -> list[str]:
    """Connections that send `first`, and `drip` every second."""
    held: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        for i in range(size):
            held.append(await target.connect())
            held[-1][1].write(first)
            if i % 100 == 0:
                await asyncio.sleep(0.01)
    except OSError as error:
        print(f"{len(held)} of {size} connections: {error}", file=sys.stderr)
    until = time.monotonic() + seconds
    while drip and time.monotonic() < until:
        for _, writer in held:
            if not writer.transport.is_closing():
                writer.write(drip)
        await asyncio.sleep(1)
    await asyncio.sleep(max(0.0, until - time.monotonic()))
    states = ["closed" if writer.transport.is_closing() or reader.at_eof() else "open" for reader, writer in held]
    for _, writer in held:
        writer.transport.abort()
    await asyncio.sleep(1)
    return states


@abuse("4000 idle connections")
async def idle(target: Target) -> list[str]:
    """They say nothing."""
    return await crowd(target, 4000, b"", b"", 8)


@abuse("8000 idle connections, more than the limit")
async def too_many(target: Target) -> list[str]:
    """They say nothing, either."""
    return await crowd(target, 8000, b"", b"", 3)


@abuse("2000 headers that drip in")
async def slow_headers(target: Target) -> list[str]:
    """One more header per second."""
    return await crowd(target, 2000, b"GET /live HTTP/1.1\r\n", b"a: b\r\n", 9)


@abuse("1000 bodies that drip in")
async def slow_bodies(target: Target) -> list[str]:
    """One more byte per second; they are given up after half a minute."""
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n".encode()
    return await crowd(target, 1000, head, b" ", 6)


# -- measuring -----------------------------------------------------------------------------------------------


async def polite(target: Target, waits: list[float]) -> None:
    """A short request twenty times a second."""
    raw = request(chat("How are you?"))
    while True:
        began = time.perf_counter()
        if await target.send(raw) == "200":
            waits.append(time.perf_counter() - began)
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def server() -> AsyncIterator[Target]:
    """A server in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--serve", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield Target(json.loads(await process.stdout.readline())["port"], process)
    finally:
        process.kill()
        await process.wait()


async def measure(target: Target, name: str) -> None:
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
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    import uvloop

    if args.serve:
        import logging

        import structlog

        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )
        uvloop.run(run_server())
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(attack(args.only or list(ABUSES), args.rounds))


if __name__ == "__main__":
    main()
