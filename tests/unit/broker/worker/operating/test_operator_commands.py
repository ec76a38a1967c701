"""Operators' commands that fail as nothing foresaw: they are answered, and the worker goes on."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from headrace.broker.codec import decode
from headrace.broker.messages import Done, LoadAdapter
from headrace.broker.worker.operating.operator_commands import OperatorCommands
from headrace.jetstream.tasks import TaskScope
from tests.unit.broker.worker.test_state import state


class Broken:
    """Adapters of an engine that fails, and what is answered."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.messaging = self

    async def load(self, name: str, source: str) -> str:
        raise OSError(36, "File name too long")

    def send(self, subject: str, data: bytes, *, reply: str = "") -> None:
        self.sent.append((subject, data))


async def test_a_failing_adapter_ends_its_command_and_not_the_worker() -> None:
    world = Broken()
    commands = OperatorCommands.__new__(OperatorCommands)
    for name, value in {"_messaging": world, "_adapters": world, "_state": state()}.items():
        setattr(commands, name, cast("Any", value))
    async with asyncio.timeout(5), TaskScope() as tasks:
        commands._tasks = tasks
        commands.begin_adapter(LoadAdapter(name="a", source="x" * 5000), "back")
    ((subject, data),) = world.sent
    assert subject == "back"
    assert decode(Done, data) == Done(ok=False, message="adapter 'a' was not changed: OSError")
