"""Operators' commands that change something are told to the frontends, whose audit logs then have them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.broker.codec import decode, encode
from headrace.broker.messages.durable import Unreadable
from headrace.broker.messages.operator import OperatorAct
from headrace.cli import main
from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from tests.support.adapter_folders import adapter_folder


async def test_commands_that_change_something_are_told_and_those_that_look_are_not(
    connection: Connection,
    subjects: Subjects,
    nats_server: EmbeddedServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    acts: list[OperatorAct] = []
    await connection.subscribe(subjects.audit(), lambda message: acts.append(decode(OperatorAct, message.data)))
    letter = Unreadable(subject="x", why="broken", data=b"a prompt", at=1.0)
    await connection.publish(subjects.dlq("p"), encode(letter))
    await connection.api.call(f"STREAM.DELETE.{subjects.stream('LOAD')}")
    folder = adapter_folder(tmp_path / "adapter")
    where = ["--nats", nats_server.url, "--prefix", subjects.prefix]

    async def run(*words: str) -> None:
        assert await asyncio.to_thread(main, [*words, *where]) == 0, capsys.readouterr().err

    for looking in (["streams", "plan"], ["dlq", "ls"], ["keys", "ls"], ["adapter", "ls"]):
        await run(*looking)
    await run("streams", "apply")
    await run("streams", "apply")  # nothing is changed by this one
    await run("dlq", "drop", "--all")
    await run("streams", "purge", "REQ", "--yes")
    await run("adapter", "push", "one", str(folder))
    await run("adapter", "rm", "one")
    async with asyncio.timeout(10):  # they come from connections of their own, which the server reads after their end
        while [act.command for act in acts][-1:] != ["adapter rm"]:
            await asyncio.sleep(0.01)
    assert [act.command for act in acts] == ["streams apply", "dlq drop", "streams purge", "adapter push", "adapter rm"]
    assert acts[0].details == {"changed": f"['{subjects.stream('LOAD')}']"}
    assert acts[1].details == {"letters": "[1]"}
    assert acts[2].details["stream"] == subjects.stream("REQ")
    assert all(act.by for act in acts)
    assert "a prompt" not in str(acts)
