"""A server on a real socket, and what clients that keep to no rules send it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

from headrace.frontend.serving import listen, serve
from headrace.frontend.settings import FrontendSettings
from tests.support.frontend.fakes import FakeIngress, chat, frontend

PATH = "/v1/chat/completions"
TEXT = "the text that is replaced"


class Running:
    def __init__(self, ingress: FakeIngress, built: Any, port: int) -> None:
        self.ingress = ingress
        self.metrics = built.metrics
        self.port = port
        self.writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def send(self, raw: bytes) -> bytes:
        """Everything the server says until it closes the connection."""
        reader, writer = await self.connect()
        answer = b""
        with contextlib.suppress(ConnectionError):
            writer.write(raw)
            await writer.drain()
            async with asyncio.timeout(10):
                while part := await reader.read(65536):
                    answer += part
        writer.close()
        return answer

    async def alive(self) -> None:
        """It answers others as ever."""
        answer = await self.send(post(chat()))
        assert answer.startswith(b"HTTP/1.1 200"), answer


@contextlib.asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[Running]:
    wishes = FrontendSettings(port=0, drain_grace_s=0, access_log=False, **settings)
    ingress = FakeIngress()
    built = frontend(ingress, access_log=False, **settings)
    listener = listen(wishes)
    listening = asyncio.Event()

    async def drain(grace_s: float) -> None:
        pass

    task = asyncio.create_task(serve(built, wishes, listener, drain=drain, on_listening=lambda url: listening.set()))
    try:
        await asyncio.wait_for(listening.wait(), 5)
        server = Running(ingress, built, listener.getsockname()[1])
        try:
            yield server
        finally:
            for writer in server.writers:
                writer.transport.abort()
    finally:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
        await asyncio.wait_for(task, 10)
        listener.close()


def request(*headers: str, method: str = "POST", path: str = PATH, body: bytes = b"") -> bytes:
    return (
        "\r\n".join(
            [f"{method} {path} HTTP/1.1", "host: localhost", "content-type: application/json", "connection: close", *headers]
        ).encode()
        + b"\r\n\r\n"
        + body
    )


def post(document: Any) -> bytes:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return request(f"content-length: {len(body)}", body=body)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def error(answer: bytes) -> Any:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
