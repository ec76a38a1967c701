"""Clients that do not read their answer, on a real socket: bounded buffers, a pause, and in the end a cut with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from headrace.broker.messages.frames import Row
from headrace.frontend.app import Frontend
from headrace.frontend.http import connections
from headrace.frontend.serving import listen, serve
from headrace.frontend.settings import FrontendSettings
from tests.support.frontend.fakes import FakeIngress, chat, end, frontend, row

HEAD = "host: localhost\r\ncontent-type: application/json\r\n"
PIECE = 65536
STEPS = 400  # far more than sockets and buffers hold


@dataclass
class Running:
    ingress: FakeIngress
    built: Frontend
    port: int

    async def ask(self, *, stream: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        raw = json.dumps(chat(stream=stream)).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=PIECE)
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{HEAD}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        await writer.drain()
        return reader, writer

    def cut(self) -> float:
        text = self.built.metrics.render().decode()
        return float(
            next(line for line in text.splitlines() if line.startswith("headrace_frontend_slow_clients_total")).split()[1]
        )

    async def until_cut(self) -> None:
        async with asyncio.timeout(10):
            while not self.cut():
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(slow_client_s: float) -> AsyncIterator[Running]:
    big: list[Row] = [row("x" * PIECE)]
    ingress = FakeIngress(lambda job: [*([big] * STEPS), [row("y", fin=end())]])
    built = frontend(ingress, slow_client_s=slow_client_s)
    listener = listen(FrontendSettings(port=0, drain_grace_s=0))
    listening = asyncio.Event()

    async def drain(grace_s: float) -> None: ...

    settings = FrontendSettings(port=0, drain_grace_s=0)
    task = asyncio.create_task(serve(built, settings, listener, drain=drain, on_listening=lambda url: listening.set()))
    try:
        await asyncio.wait_for(listening.wait(), 5)
        yield Running(ingress, built, listener.getsockname()[1])
    finally:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
        await asyncio.wait_for(task, 5)
        listener.close()


async def test_a_stream_that_nobody_reads_is_cut_and_its_reason_is_the_last_event() -> None:
    async with running(slow_client_s=0.2) as server:
        reader, writer = await server.ask(stream=True)
        await server.until_cut()
        (answer,) = server.ingress.answers
        assert answer.cancelled, "the work goes on for nobody"
        assert answer.reads < STEPS, "rows were taken that nobody had read"
        everything = await asyncio.wait_for(reader.read(-1), 10)  # it reads after all, within the time that it still has
        *_, last, rest = everything.rsplit(b"data: ", 1)
        del last
        assert json.loads(rest.split(b"\n\n")[0])["error"]["code"] == "slow_client"
        assert everything.endswith(b"0\r\n\r\n")
        writer.close()


async def test_a_whole_answer_that_nobody_reads_is_cut_too() -> None:
    async with running(slow_client_s=0.2) as server:
        _, writer = await server.ask(stream=False)
        await server.until_cut()
        writer.close()


@pytest.mark.slow
async def test_a_client_that_never_reads_again_does_not_keep_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.2)
    async with running(slow_client_s=0.2) as server:
        reader, writer = await server.ask(stream=True)
        await server.until_cut()
        async with asyncio.timeout(10):
            while b"headrace_frontend_connections 0" not in server.built.metrics.render():
                await asyncio.sleep(0.05)
        with contextlib.suppress(ConnectionError):
            assert b"[DONE]" not in await reader.read(-1)
        writer.close()


async def test_a_client_that_reads_slowly_gets_everything() -> None:
    async with running(slow_client_s=0.5) as server:
        reader, writer = await server.ask(stream=True)
        seen = 0
        tail = b""
        async with asyncio.timeout(30):
            while b"[DONE]" not in tail:
                part = await reader.read(1 << 20)
                assert part, "cut although it reads"
                seen += len(part)
                tail = (tail + part)[-64:]
                await asyncio.sleep(0.002)
        assert seen > PIECE * STEPS
        assert server.cut() == 0
        writer.close()
