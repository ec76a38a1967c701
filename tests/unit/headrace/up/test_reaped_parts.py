"""Processes whose leases wait to be revoked: how many may wait, and what is said meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from structlog.testing import capture_logs

from headrace.config.settings import load
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.errors import ServerUnreachable
from headrace.jetstream.subjects import Subjects
from headrace.up import reaped_parts
from headrace.up import reaped_parts as lease_revocation
from headrace.up.nats_part import NatsPart
from headrace.up.parts import Reaped
from headrace.up.reaped_parts import ReapedParts


def test_only_so_many_wait_and_each_one_more_is_left_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaped_parts, "_WAITING", 2)
    settings = load("up", flags={"nats.url": "nats://127.0.0.1:1"})
    reaped = ReapedParts(settings, NatsPart(settings))
    with capture_logs() as said:
        for pid in (1, 2, 3):
            reaped.add(Reaped(pid, 0.0))
    assert [(line["event"], line["pid"]) for line in said] == [("lease.left", 3)]


async def test_while_no_server_can_be_reached_the_log_says_so_and_how_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = 0

    async def connect(*_: Any, **__: Any) -> Connection:
        nonlocal tried
        tried += 1
        raise ServerUnreachable("no server")

    monkeypatch.setattr(Connection, "connect", connect)
    monkeypatch.setattr(lease_revocation, "_GIVE_UP_S", 0.02)
    monkeypatch.setattr(lease_revocation, "_CONNECT_AGAIN_S", 0.001)
    queue: asyncio.Queue[Reaped] = asyncio.Queue(8)
    queue.put_nowait(Reaped(1, 0.0))
    with capture_logs() as said:
        task = asyncio.create_task(lease_revocation.revoke_leases(ConnectOptions(), Subjects("p"), queue))
        async with asyncio.timeout(20):
            while len(said) < 2:
                await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert {(line["event"], line["log_level"], line["waiting"]) for line in said} == {("leases.not_watched", "warning", 1)}
    assert tried > 2
    assert queue.qsize() == 1, "it is revoked once the server is there"
