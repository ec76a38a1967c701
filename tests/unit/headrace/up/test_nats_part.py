"""The nats-server of `headrace up`: started again after a crash, and when it stores nothing although there is room."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

from headrace.base.errors import StartFailed
from headrace.jetstream.errors import ConnectError
from headrace.up import nats_part
from headrace.up.nats_part import NatsPart
from headrace.up.restart_policy import Backoff
from headrace.up.stuck_store import ROOM_BYTES


class Server:
    """An embedded server that crashes `crashes` times, each time right after its start."""

    def __init__(self, crashes: int = 0) -> None:
        self.data_dir = Path("/nowhere")
        self.crashes = crashes
        self.restarts = 0
        self.answers = True

    @property
    def running(self) -> bool:
        return self.restarts >= self.crashes

    async def restart_async(self) -> None:
        self.restarts += 1
        if self.restarts == 2:
            raise ConnectError("not ready in time")

    async def answers_async(self) -> bool:
        return self.answers


def part(server: Server, monkeypatch: pytest.MonkeyPatch) -> NatsPart:
    settings: Any = {"nats.url": ("nats://elsewhere",), "nats.context": ""}
    settings |= {f"server.tls_{name}": None for name in ("cert", "key", "client_ca")}
    made = NatsPart(settings)
    made._server = server  # type: ignore[assignment]
    for name in ("_WATCH_EVERY_S", "_ASK_EVERY_S"):
        monkeypatch.setattr(nats_part, name, 0.0)
    return made


async def run_until(work: Any, done: asyncio.Event) -> None:
    task = asyncio.ensure_future(work)
    async with asyncio.timeout(10):
        await asyncio.wait([task, asyncio.ensure_future(done.wait())], return_when=asyncio.FIRST_COMPLETED)
    assert not task.done()
    task.cancel()


async def test_a_server_that_crashes_again_and_again_is_back_within_two_seconds_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, waits, done = Server(crashes=6), [], asyncio.Event()
    nats = part(server, monkeypatch)
    sleep = asyncio.sleep

    async def noted(for_s: float) -> None:
        if for_s:
            waits.append(for_s)
        await sleep(0)

    monkeypatch.setattr("headrace.up.nats_part.asyncio.sleep", noted)
    await run_until(nats.keep(lambda: done.set() if server.running else None), done)
    assert waits == [0.5, 1.0, 2.0, 2.0, 2.0, 2.0]


async def test_a_server_that_cannot_start_ends_in_its_error_after_five_tries_that_its_disk_had_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(crashes=99)
    nats = part(server, monkeypatch)
    room = iter([0, 0, 0])
    monkeypatch.setattr(nats_part, "free_bytes", lambda _folder: next(room, ROOM_BYTES))
    monkeypatch.setattr(nats._state, "_backoff", Backoff(first_s=0.0, most_s=0.0))

    async def fails() -> None:
        server.restarts += 1
        raise ConnectError("its store is damaged")

    monkeypatch.setattr(server, "restart_async", fails)
    async with asyncio.timeout(10):
        with pytest.raises(StartFailed, match="tried 5 times: its store is damaged"):
            await nats.keep(lambda: None)
    assert server.restarts == 3 + 5


async def test_a_server_that_stores_nothing_is_started_again_when_there_is_room_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, done = Server(), asyncio.Event()
    nats = part(server, monkeypatch)
    room = iter([0, 0, ROOM_BYTES])
    monkeypatch.setattr(nats_part, "free_bytes", lambda _folder: next(room, ROOM_BYTES))
    monkeypatch.setattr("headrace.up.stuck_store.AFTER_FULL_S", 0.0)

    async def stuck() -> bool:
        return server.restarts == 0

    with structlog.testing.capture_logs() as logs:
        await run_until(nats.mend(stuck, done.set), done)
    assert server.restarts == 1
    said = [line for line in logs if line["event"] == "nats.restarting"]
    assert [(line["reason"], line["free_bytes"]) for line in said] == [
        ("it stores nothing, and its disk, which was full, has room again", ROOM_BYTES)
    ]


async def test_a_server_that_stands_still_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen one would store nothing either; it goes on where it was."""
    server, asked = Server(), asyncio.Event()
    server.answers = False
    nats = part(server, monkeypatch)
    monkeypatch.setattr(nats_part, "free_bytes", lambda _folder: ROOM_BYTES)
    monkeypatch.setattr("headrace.up.stuck_store.UNEXPLAINED_S", 0.0)
    questions = 0

    async def stuck() -> bool:
        nonlocal questions
        questions += 1
        if questions == 20:
            asked.set()
        return True

    await run_until(nats.mend(stuck, lambda: None), asked)
    assert server.restarts == 0
    server.answers = True
    asked.clear()
    await run_until(nats.mend(stuck, asked.set), asked)
    assert server.restarts == 1
