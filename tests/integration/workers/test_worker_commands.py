"""`headrace worker status` and `role`, against workers that are only a lease and an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from headrace.broker.codec import decode_worker_control, encode
from headrace.broker.messages.control import Done, Inspect, Inspection
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.prefill import AnyWorkerControl, SetRole
from headrace.broker.messages.requests import Record
from headrace.cli import main
from headrace.commands import control
from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.ports import Message
from headrace.jetstream.subjects import Subjects

Command = Callable[..., Awaitable[int]]


@pytest.fixture
def command(nats_server: EmbeddedServer, subjects: Subjects) -> Command:
    async def run(*words: str) -> int:
        return await asyncio.to_thread(main, [*words, "--nats", nats_server.url, "--prefix", subjects.prefix])

    return run


async def _worker(
    connection: Connection, subjects: Subjects, name: str, role: str, answer: Callable[[AnyWorkerControl], Record | None]
) -> list[AnyWorkerControl]:
    """Returns what it is asked, in order."""
    worker, asked = f"{name}-1f", []
    member = WorkerMember(
        worker=worker,
        pool="p",
        model="m",
        role=role,
        engine="sim",
        roles=["aggregated", "decode", "prefill"],
        handover="sim/push",
    )

    def on_message(message: Message) -> None:
        asked.append(decode_worker_control(message.data))
        if (said := answer(asked[-1])) is not None:
            connection.send(message.reply, encode(said))

    for subject in (subjects.control(worker), subjects.operate_worker("p", worker)):
        await connection.subscribe(subject, on_message)
    await connection.bucket(subjects.bucket("members")).put(subjects.worker_key("p", worker), encode(member))
    return asked


def _holding(control: AnyWorkerControl) -> Record | None:
    return Inspection(component="worker", states={"running": 3, "waiting": 0}) if isinstance(control, Inspect) else None


async def test_a_worker_is_told_its_role_and_what_it_says_is_shown(
    connection: Connection, subjects: Subjects, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = await _worker(
        connection, subjects, "prefill-1", "prefill", lambda _: Done(message="worker prefill-1-1f serves as decode")
    )
    assert await command("worker", "role", "prefill-1", "decode", "--grace", "7") == 0
    assert asked == [SetRole(role="decode", grace_s=7.0)]
    assert capsys.readouterr().out == "worker prefill-1-1f serves as decode\n"


async def test_a_refused_role_fails_with_the_workers_reason(
    connection: Connection, subjects: Subjects, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    await _worker(
        connection, subjects, "worker-1", "aggregated", lambda _: Done(ok=False, message="started for aggregated only")
    )
    assert await command("worker", "role", "worker-1", "prefill") == 1
    assert capsys.readouterr().err == "headrace worker role: worker worker-1-1f refused: started for aggregated only\n"


async def test_an_unknown_worker_fails_naming_those_that_live(
    connection: Connection, subjects: Subjects, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    await _worker(connection, subjects, "worker-1", "aggregated", lambda _: None)
    assert await command("worker", "role", "worker-9", "prefill") == 1
    assert "no live worker 'worker-9'; live: worker-1-1f" in capsys.readouterr().err


async def test_a_worker_that_does_not_answer_is_waited_for_no_longer_than_its_grace_period(
    connection: Connection,
    subjects: Subjects,
    command: Command,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "_ROLE_MARGIN_S", 0.1)
    await _worker(connection, subjects, "worker-1", "aggregated", lambda _: None)
    assert await command("worker", "role", "worker-1", "prefill", "--grace", "0.1") == 1
    assert "worker worker-1-1f has not answered within 0.2 s" in capsys.readouterr().err


async def test_a_worker_that_left_without_a_word_is_said_to_be_gone(
    connection: Connection, subjects: Subjects, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    member = WorkerMember(worker="worker-1-1f", pool="p", model="m")
    await connection.bucket(subjects.bucket("members")).put(subjects.worker_key("p", "worker-1-1f"), encode(member))
    assert await command("worker", "role", "worker-1", "prefill") == 1
    assert "worker-1-1f does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("w", "prefil"), ("w",), ("w", "prefill", "--grace", "soon")])
async def test_a_command_that_makes_no_sense_is_not_sent(command: Command, words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        await command("worker", "role", *words)
    assert ended.value.code == 2


@pytest.mark.parametrize("grace", ["-1", "nan", "inf"])
async def test_a_grace_period_without_an_end_is_refused(
    command: Command, grace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await command("worker", "role", "w", "prefill", f"--grace={grace}") == 1
    assert f"--grace must be 0 or more seconds, got {grace}" in capsys.readouterr().err


async def test_status_shows_each_worker_with_its_role_and_what_it_holds(
    connection: Connection, subjects: Subjects, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await command("worker", "status") == 0
    assert capsys.readouterr().out == "no worker is running\n"
    await _worker(connection, subjects, "prefill-1", "prefill", _holding)
    await _worker(connection, subjects, "decode-1", "decode", lambda _: Inspection(component="worker"))
    assert await command("worker", "status") == 0
    head, decode_row, prefill_row = capsys.readouterr().out.splitlines()
    assert head.split() == ["worker", "model", "engine", "role", "can", "be", "state", "holds"]
    assert decode_row.split() == ["decode-1-1f", "m", "sim", "decode", "aggregated,", "prefill", "ready", "-"]
    assert prefill_row.split() == ["prefill-1-1f", "m", "sim", "prefill", "aggregated,", "decode", "ready", "3", "running"]
    assert await command("worker", "status", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["worker"], row["role"], row["handover"]) for row in rows] == [
        ("decode-1-1f", "decode", "sim/push"),
        ("prefill-1-1f", "prefill", "sim/push"),
    ]
    assert rows[1]["state"]["states"]["running"] == 3
