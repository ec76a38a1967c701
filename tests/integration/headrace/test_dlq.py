"""`headrace dlq` on a real server: letters are found, run again under a judge of their own, and dropped."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from headrace.broker.codec import encode
from headrace.broker.messages.control import HistoryEntry
from headrace.broker.messages.durable import DeadLetter
from headrace.broker.messages.requests import Envelope, Generation, Spill
from headrace.broker.models.directory import publish_card
from headrace.cli import main
from headrace.commands.dlq import letters
from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from tests.integration.broker.test_job_path import CARD, POOL, collect, has_worker, ingress, job, nothing_stored, worker
from tests.support.executor import expected

Command = Callable[..., Awaitable[int]]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def command(nats_server: EmbeddedServer, subjects: Subjects) -> Command:
    async def run(*words: str) -> int:
        return await asyncio.to_thread(main, ["dlq", *words, "--nats", nats_server.url, "--prefix", subjects.prefix])

    return run


async def bury(connection: Connection, subjects: Subjects, name: str, *, at: float | None = None, **fields: object) -> int:
    """A dead letter of request `name`; returns its number."""
    now = time.time()
    envelope = Envelope(
        id=name,
        pool=POOL,
        model="m",
        judge="i-gone",
        deadline=now - 5,
        created=now - 35,
        tokens=1,
        max_tokens=6,
        payload=encode(Generation(token_ids=b"\1\0\0\0")),
    )
    envelope = msgspec.structs.replace(envelope, **fields)
    letter = DeadLetter(
        envelope=envelope,
        reason="poison",
        attempt=3,
        history=[HistoryEntry(n, f"w-{n}") for n in (1, 2, 3)],
        at=now if at is None else at,
    )
    return (await connection.publish(subjects.dlq(POOL), encode(letter))).seq


async def advise(connection: Connection, subjects: Subjects) -> int:
    said = {"type": "io.nats.jetstream.advisory.v1.max_deliver", "stream": "S", "consumer": "C", "stream_seq": 1}
    stream = subjects.stream("WORK")
    subject = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{stream}.W_w"
    return (await connection.publish(subject, json.dumps(said).encode())).seq


async def test_letters_are_listed_and_shown_by_number_and_by_request(
    connection: Connection, subjects: Subjects, command: Command, capsys: Captured
) -> None:
    assert await command("ls") == 0
    assert capsys.readouterr().out == "there are no dead letters\n"
    first = await bury(connection, subjects, "r1")
    second = await advise(connection, subjects)
    assert await command("ls") == 0
    head, one, two = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "number"
    assert one.split()[:5:2] == [str(first), "poison", "m"]
    assert one.endswith("w-1, w-2, w-3")
    assert two.split()[:3:2] == [str(second), "max_deliver"]
    assert await command("ls", "--json") == 0
    assert [row["reason"] for row in json.loads(capsys.readouterr().out)] == ["poison", "max_deliver"]
    for name in (str(first), "r1", "chatcmpl-r1"):
        assert await command("show", name) == 0
        assert capsys.readouterr().out.startswith(f"{first}: request r1, poison\n")
    assert await command("show", "r9") == 1
    assert "there is no dead letter 'r9'" in capsys.readouterr().err


async def test_a_retried_letter_is_answered_here_and_is_gone(
    connection: Connection, subjects: Subjects, command: Command, capsys: Captured
) -> None:
    await publish_card(connection, subjects, CARD, {"tokenizer.json": b"{}"})
    number = await bury(connection, subjects, "r1", choices=2)
    async with worker(connection, subjects, "w1"):
        capsys.readouterr()  # the worker of this process has logged
        assert await command("retry", "r1", "--json", "--keep") == 0
        kept = json.loads(capsys.readouterr().out)
        assert (kept["number"], kept["request"], kept["dropped"]) == (number, "r1", False)
        assert kept["retried_as"] != "r1"
        texts = [" ".join(map(str, expected(kept["retried_as"], choice, 6))) + " " for choice in (0, 1)]
        assert kept["choices"] == [{"text": text, "tokens": 6, "finish_reason": "length"} for text in texts]
        assert await command("retry", str(number)) == 0
        said = capsys.readouterr()
        assert said.out.startswith("--- choice 0, length\n")
        assert said.err.endswith(f"dead letter {number} dropped\n")
        assert await command("show", str(number)) == 1
        await nothing_stored(connection, subjects)
    members = await connection.bucket(subjects.bucket("members")).entries("ingress.>")
    assert members == [], "the command's lease is given back"


async def test_a_letter_that_cannot_be_run_stays(
    connection: Connection, subjects: Subjects, command: Command, capsys: Captured
) -> None:
    await bury(connection, subjects, "r1")
    await bury(connection, subjects, "r2", payload=b"", spill=Spill(object="gone", size=9, digest="0"))
    advisory = await advise(connection, subjects)
    assert await command("retry", "r1") == 1
    assert "model 'm' is not served here" in capsys.readouterr().err
    await publish_card(connection, subjects, CARD, {"tokenizer.json": b"{}"})
    assert await command("retry", "r1") == 1
    assert "r1 was not accepted: model 'm' has no ready worker" in capsys.readouterr().err
    assert await command("retry", "r2") == 1
    assert "its copy is gone" in capsys.readouterr().err
    assert await command("retry", str(advisory)) == 1
    assert "there is nothing to run" in capsys.readouterr().err
    assert await command("ls", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 3


@pytest.mark.slow
async def test_a_retry_that_takes_too_long_fails_frees_the_worker_and_keeps_the_letter(
    connection: Connection, subjects: Subjects, command: Command, capsys: Captured
) -> None:
    await publish_card(connection, subjects, CARD, {"tokenizer.json": b"{}"})
    await bury(connection, subjects, "r1", max_tokens=1_000_000)
    async with worker(connection, subjects, "w1", step_s=0.01) as session:
        assert await command("retry", "r1", "--deadline", "1") == 1
        assert "r1 failed again" in capsys.readouterr().err
        async with asyncio.timeout(5):
            while len(session.runs.table):
                await asyncio.sleep(0.01)
    assert await command("show", "r1") == 0


async def test_letters_are_dropped_by_name_by_age_and_all(
    connection: Connection, subjects: Subjects, command: Command, capsys: Captured
) -> None:
    first = await bury(connection, subjects, "r1")
    await bury(connection, subjects, "r2")
    await bury(connection, subjects, "old", at=time.time() - 5000)
    await advise(connection, subjects)  # of unknown age

    async def left() -> list[str]:
        capsys.readouterr()
        await command("ls", "--json")
        return [row.get("request", "-") for row in json.loads(capsys.readouterr().out)]

    assert await command("drop") == 1
    assert await command("drop", "r1", "--all") == 1
    assert await command("drop", "r2", "r9") == 1, "one that is not there: none is dropped"
    assert await left() == ["r1", "r2", "old", "-"]
    assert await command("drop", "r2", str(first), "r1") == 0
    assert capsys.readouterr().out == "2 dead letters dropped\n"
    assert await command("drop", "--older-than", "4000") == 0
    assert await left() == ["-"]
    assert await command("drop", "--all", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["dropped"]) == 1
    assert await left() == []


async def test_a_message_that_nobody_can_read_becomes_a_letter_and_holds_up_nothing(
    connection: Connection, subjects: Subjects, command: Command, capsys: Captured
) -> None:
    async with ingress(connection, subjects) as served, worker(connection, subjects, "w1"):
        await has_worker(served)
        for subject in (subjects.req(POOL, "std"), subjects.work(POOL, "w1")):
            await connection.publish(subject, b"not what anybody \xc1 writes")
        request = job(6)
        assert await collect(await served.submit(request)) == expected(request.id, 0, 6)
        await nothing_stored(connection, subjects)
        async with asyncio.timeout(5):
            while len(found := await letters(connection, subjects)) < 2:
                await asyncio.sleep(0.02)
    assert sorted(one.unreadable.subject for one in found if one.unreadable) == sorted(
        [subjects.req(POOL, "std"), subjects.work(POOL, "w1")]
    )
    assert {one.unreadable.data for one in found if one.unreadable} == {b"not what anybody \xc1 writes"}
    assert await command("ls") == 0
    assert capsys.readouterr().out.count("unreadable") == 2
