"""The HTTP server on a real socket (uvicorn, httptools), over a fake ingress: readers that leave or are slow, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from headrace.base.process import REFUSE
from headrace.broker.messages.frames import Row
from headrace.frontend.app import Frontend
from headrace.frontend.errors import AddressUnavailable
from headrace.frontend.serving import listen, serve
from headrace.frontend.settings import FrontendSettings
from tests.support.frontend.fakes import FakeIngress, chat, end, frontend, row

HEAD = "host: localhost\r\ncontent-type: application/json\r\n"


@dataclass
class Running:
    ingress: FakeIngress
    built: Frontend
    task: asyncio.Task[None]
    port: int
    drained: list[float] = field(default_factory=list)

    async def ask(self, body: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        raw = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**16)
        head = f"POST /v1/chat/completions HTTP/1.1\r\n{HEAD}content-length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        await writer.drain()
        return reader, writer

    async def answer(self, index: int = 0):  # type: ignore[no-untyped-def]
        async with asyncio.timeout(5):
            while len(self.ingress.answers) <= index or not self.ingress.answers[index].reads:
                await asyncio.sleep(0.002)
        return self.ingress.answers[index]


@contextlib.asynccontextmanager
async def running(ingress: FakeIngress, *, drain_grace_s: float = 5.0, drains: bool = True) -> AsyncIterator[Running]:
    """With `drains=False` its work lasts for as long as it is given."""
    settings = FrontendSettings(port=0, drain_grace_s=drain_grace_s)
    built = frontend(ingress)
    listener = listen(settings)
    listening = asyncio.Event()
    drained: list[float] = []

    async def drain(grace_s: float) -> None:
        drained.append(grace_s)
        if not drains:
            await asyncio.sleep(grace_s)

    task = asyncio.create_task(serve(built, settings, listener, drain=drain, on_listening=lambda url: listening.set()))
    try:
        await asyncio.wait_for(listening.wait(), 5)
        yield Running(ingress, built, task, listener.getsockname()[1], drained)
    finally:
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(task, 5)
        listener.close()


async def until_cancelled(answer) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(5):
        while not answer.cancelled:
            await asyncio.sleep(0.002)


async def test_a_connection_closed_before_the_first_token_cancels_the_job() -> None:
    async with running(FakeIngress(lambda job: [])) as server:
        _, writer = await server.ask(chat())
        answer = await server.answer()
        writer.close()
        await until_cancelled(answer)


async def test_a_connection_reset_in_mid_stream_cancels_the_job() -> None:
    async with running(FakeIngress(lambda job: [[row("a")]])) as server:
        reader, writer = await server.ask(chat(stream=True))
        await reader.readuntil(b'"content":"a"')
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        writer.transport.abort()
        await until_cancelled(server.ingress.answers[0])


async def test_a_reader_that_stops_reading_stops_the_taking_of_rows() -> None:
    big: list[Row] = [row("x" * 65536) for _ in range(4)]
    async with running(FakeIngress(lambda job: [big] * 200)) as server:
        _, writer = await server.ask(chat(stream=True))
        answer = await server.answer()
        seen = -1
        while seen != answer.reads:
            seen = answer.reads
            await asyncio.sleep(0.1)
        assert seen < 150
        writer.close()
        await until_cancelled(answer)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_after_a_signal_running_answers_finish_and_the_port_is_closed(number: signal.Signals) -> None:
    async with running(FakeIngress(lambda job: [[row("a")]])) as server:
        reader, writer = await server.ask(chat(stream=True))
        await reader.readuntil(b'"content":"a"')
        os.kill(os.getpid(), number)
        async with asyncio.timeout(5):
            while True:
                try:
                    _, other = await asyncio.open_connection("127.0.0.1", server.port)
                    other.close()
                except ConnectionRefusedError:
                    break
                except ConnectionResetError:  # it stood in line when the port was closed
                    continue
                await asyncio.sleep(0.01)
        server.ingress.answers[0].push([row("b", fin=end())])
        rest = await reader.read(-1)
        assert b'"content":"b"' in rest
        assert b"[DONE]" in rest
        await asyncio.wait_for(server.task, 5)
        assert server.drained == [5.0]
        writer.close()


async def test_one_that_is_to_refuse_requests_goes_on_with_the_others() -> None:
    async with running(FakeIngress(lambda job: [[row("a")]])) as server:
        reader, writer = await server.ask(chat(stream=True))
        await reader.readuntil(b'"content":"a"')
        os.kill(os.getpid(), REFUSE)
        async with asyncio.timeout(5):
            while not server.built.lifecycle.draining:
                await asyncio.sleep(0.002)
        refused, other = await server.ask(chat())
        head = await asyncio.wait_for(refused.readuntil(b"\r\n\r\n"), 5)
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in head
        other.close()
        assert not server.drained
        server.ingress.answers[0].push([row("b", fin=end())])
        assert b"[DONE]" in await reader.readuntil(b"[DONE]")
        writer.close()


async def test_a_second_signal_ends_the_grace_period_before_the_connections() -> None:
    async with running(FakeIngress(lambda job: [[row("a")]]), drain_grace_s=60.0, drains=False) as server:
        reader, writer = await server.ask(chat(stream=True))
        await reader.readuntil(b'"content":"a"')
        async with asyncio.timeout(5):
            for told in ([60.0], [60.0, 0.0]):
                os.kill(os.getpid(), signal.SIGTERM)
                while server.drained != told:
                    await asyncio.sleep(0.002)
        server.ingress.answers[0].push([row("b", fin=end())])
        rest = await asyncio.wait_for(reader.read(-1), 5)
        assert b"[DONE]" in rest
        await asyncio.wait_for(server.task, 5)
        writer.close()


@pytest.mark.slow
async def test_answers_that_outlive_the_grace_period_are_told_so() -> None:
    async with running(FakeIngress(lambda job: [[row("a")]]), drain_grace_s=0.1) as server:
        reader, writer = await server.ask(chat(stream=True))
        await reader.readuntil(b'"content":"a"')
        os.kill(os.getpid(), signal.SIGTERM)
        rest = await asyncio.wait_for(reader.read(-1), 10)
        assert b'"code":"draining"' in rest
        assert b"[DONE]" not in rest
        await asyncio.wait_for(server.task, 5)
        writer.close()


async def test_a_port_in_use_is_one_clear_error() -> None:
    async with running(FakeIngress()) as server:
        with pytest.raises(AddressUnavailable, match=str(server.port)):
            listen(FrontendSettings(port=server.port))
