"""Topology on a real server, and the command line around it."""

import asyncio
import dataclasses
import json

import pytest

from headrace.cli import main
from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import DiskFull, TopologyError
from headrace.jetstream.ports import Delivery
from headrace.jetstream.provision import ensure_on_demand, ensure_topology, plan, purge, remove_topology, status
from headrace.jetstream.settings import ServerSettings
from headrace.jetstream.specs import BucketSpec
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import EMBEDDINGS, Topology, request_consumer, work_consumer
from tests.conftest import Connect
from tests.integration.jetstream.test_pull import running
from tests.integration.jetstream.waiting import until


async def test_a_topology_is_planned_made_and_then_as_it_should_be(connect: Connect, subjects: Subjects) -> None:
    connection = await connect()
    topology = Topology(subjects)
    assert {p.action for p in await plan(connection, topology)} == {"create"}
    await asyncio.gather(*(ensure_topology(connection, topology) for _ in range(4)))  # many starting at once
    assert {p.action for p in await plan(connection, topology)} == {"keep"}
    wider = dataclasses.replace(topology, tenant_cap=7)
    changed = [p for p in await plan(connection, wider) if p.action != "keep"]
    assert [(p.stream, p.action) for p in changed] == [(subjects.stream("REQ"), "update")]
    assert [(c.name, c.current, c.wanted) for c in changed[0].changes] == [("max_msgs_per_subject", topology.tenant_cap, 7)]
    await ensure_topology(connection, wider)
    assert {p.action for p in await plan(connection, wider)} == {"keep"}
    await remove_topology(connection, wider)


async def test_a_bucket_of_an_older_version_moves_from_files_to_memory(connect: Connect, subjects: Subjects) -> None:
    connection = await connect()
    topology = Topology(subjects)
    older = dataclasses.replace(BucketSpec(name=subjects.bucket("members"), description="leases"), storage="file").stream()
    await connection.api.call(f"STREAM.CREATE.{older.name}", older.config())
    await asyncio.gather(*(ensure_topology(connection, topology) for _ in range(3)))
    assert (await connection.api.call(f"STREAM.INFO.{older.name}"))["config"]["storage"] == "memory"
    assert {p.action for p in await plan(connection, topology)} == {"keep"}
    await remove_topology(connection, topology)


async def test_the_size_that_an_operator_gave_a_store_of_a_pool_stays(connect: Connect, subjects: Subjects) -> None:
    connection = await connect()
    topology = Topology(subjects)
    await ensure_topology(connection, topology)
    await ensure_on_demand(connection, topology.embeddings("p"))
    stream = f"OBJ_{subjects.pool_bucket(EMBEDDINGS, 'p')}"
    config = (await connection.api.call(f"STREAM.INFO.{stream}"))["config"]
    await connection.api.call(f"STREAM.UPDATE.{stream}", config | {"max_bytes": 12345678, "description": "mine"})
    (changed,) = [p for p in await plan(connection, topology) if p.action != "keep"]
    assert (changed.stream, [change.name for change in changed.changes]) == (stream, ["description"])
    await ensure_topology(connection, topology)
    now = (await connection.api.call(f"STREAM.INFO.{stream}"))["config"]
    assert (now["max_bytes"], now["description"]) == (12345678, config["description"])
    await remove_topology(connection, topology)


async def test_what_cannot_be_changed_is_named(connect: Connect, subjects: Subjects) -> None:
    connection = await connect()
    topology = Topology(subjects)
    spec = topology.streams()[0]
    await connection.api.call(f"STREAM.CREATE.{spec.name}", dataclasses.replace(spec, retention="limits").config())
    with pytest.raises(TopologyError, match=spec.name):
        await ensure_topology(connection, topology)
    await remove_topology(connection, topology)


async def test_a_server_without_room_says_so(tmp_path, connect: Connect, subjects: Subjects) -> None:  # type: ignore[no-untyped-def]
    with EmbeddedServer(tmp_path, ServerSettings(max_file_store="10MB")) as small:
        connection = await connect(small)
        with pytest.raises(DiskFull, match="no room for stream"):
            await ensure_topology(connection, Topology(subjects))


async def test_consumers_are_made_changed_and_removed_again_and_again(connection: Connection, subjects: Subjects) -> None:
    for spec in (work_consumer(subjects, "p", "w"), request_consumer(subjects, "p", "re")):
        await connection.ensure_consumer(spec)
        await connection.ensure_consumer(spec)
        await connection.ensure_consumer(dataclasses.replace(spec, ack_wait_s=5.0))
        await connection.delete_consumer(spec.stream, spec.name)
        await connection.delete_consumer(spec.stream, spec.name)
    with pytest.raises(TopologyError, match="W_w"):
        await connection.ensure_consumer(dataclasses.replace(work_consumer(subjects, "p", "w"), stream="NOPE"))


@pytest.mark.slow
async def test_a_consumer_whose_file_is_damaged_is_made_in_memory_and_delivers(
    own_server: EmbeddedServer, connect: Connect, subjects: Subjects
) -> None:
    connection = await connect(own_server, topology=Topology(subjects))
    spec = work_consumer(subjects, "p", "w")
    await connection.ensure_consumer(spec)
    await connection.publish(subjects.work("p", "w"), b"job")
    async with running(connection.pull(spec.stream, spec.name, lambda _delivery: None, credit=1)):
        await until(lambda: connection.connected)
    own_server.kill()
    states = [file for file in own_server.data_dir.rglob(f"obs/{spec.name}/o.dat") if file.stat().st_size]
    assert states
    for file in states:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    await own_server.start_async()
    await until(lambda: connection.connected)
    got: list[Delivery] = []
    for _ in range(2):
        await connection.ensure_consumer(spec)
    async with running(connection.pull(spec.stream, spec.name, got.append, credit=1)):
        await until(lambda: bool(got))
    assert got[0].data == b"job"


async def test_stored_messages_are_read_counted_and_deleted(connection: Connection, subjects: Subjects) -> None:
    stream = subjects.stream("WORK")
    for n in range(5):
        await connection.publish(subjects.work("p", "ab"[n % 2]), b"%d" % n, headers={"Hr-Attempt": str(n)})
    assert await connection.subject_counts(stream, subjects.work_filter("p")) == {
        subjects.work("p", "a"): 3,
        subjects.work("p", "b"): 2,
    }
    found = await connection.subject_messages(stream, subjects.work("p", "a"))
    wanted = [(s, b"%d" % (s - 1), {"Hr-Attempt": str(s - 1)}) for s in (1, 3, 5)]
    assert [(m.seq, m.data, m.headers) for m in found] == wanted
    assert [m.seq for m in await connection.subject_messages(stream, subjects.work("p", "a"), limit=2)] == [1, 3]
    assert await connection.delete_message(stream, 3)
    assert not await connection.delete_message(stream, 3)
    assert not await connection.delete_message(stream, 99)
    assert await connection.get_message(stream, 3) is None
    stored = await connection.get_message(stream, 1)
    assert stored is not None
    assert (stored.subject, stored.data) == (subjects.work("p", "a"), b"0")
    assert await connection.subject_messages(stream, subjects.work("p", "none")) == []
    with pytest.raises(TopologyError):
        await connection.subject_messages("NOPE", "x")


async def test_more_messages_than_one_read_takes_come_in_order(connection: Connection, subjects: Subjects) -> None:
    await asyncio.gather(*(connection.publish(subjects.work("p", "w"), b"") for _ in range(600)))
    found = await connection.subject_messages(subjects.stream("WORK"), subjects.work("p", "w"), limit=550)
    assert [m.seq for m in found] == list(range(1, 551))


async def test_status_shows_depth_age_and_consumers(connection: Connection, subjects: Subjects) -> None:
    await connection.ensure_consumer(work_consumer(subjects, "p", "w"))
    for _ in range(3):
        await connection.publish(subjects.work("p", "w"), b"x")
    got: list[Delivery] = []
    loop = connection.pull(subjects.stream("WORK"), subjects.work_consumer("w"), got.append, credit=4)
    async with running(loop):
        await until(lambda: len(got) == 3)
        got[0].nak()
        await until(lambda: len(got) == 4)
    await connection.publish(subjects.work("p", "w"), b"x")
    found = {s.stream: s for s in await status(connection, Topology(subjects))}
    work = found[subjects.stream("WORK")]
    assert (work.exists, work.messages, work.subjects) == (True, 4, 1)
    assert work.oldest_age_s is not None
    assert 0 <= work.oldest_age_s < 60
    (consumer,) = work.consumers
    assert (consumer.name, consumer.ack_pending, consumer.redelivered, consumer.waiting_messages) == ("W_w", 3, 1, 1)
    assert found[subjects.stream("REQ")].oldest_age_s is None
    assert await purge(connection, subjects.stream("WORK"), subject=subjects.work("p", "other")) == 0
    assert await purge(connection, subjects.stream("WORK")) == 4


async def test_what_the_server_gives_up_becomes_a_dead_letter_and_what_is_moved_does_not(
    connection: Connection, subjects: Subjects
) -> None:
    spec = dataclasses.replace(work_consumer(subjects, "p", "w"), max_deliver=1)
    await connection.ensure_consumer(spec)
    await connection.publish(subjects.work("p", "w"), b"moved")
    await connection.publish(subjects.work("p", "w"), b"given up")
    got: list[Delivery] = []
    loop = connection.pull(spec.stream, spec.name, got.append, credit=3)
    async with running(loop):
        await until(lambda: len(got) == 2)
        await connection.delete_message(spec.stream, got[0].stream_seq)  # the server calls this terminated
        got[1].nak()
    subject = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{spec.stream}.{spec.name}"
    async with asyncio.timeout(10.0):
        while not (found := await connection.subject_messages(subjects.stream("DLQ"), subject)):
            await asyncio.sleep(0.01)
    assert json.loads(found[0].data)["deliveries"] == 1
    assert (await connection.stream_state(subjects.stream("DLQ"))).messages == 1


# -- the command line ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_logging_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loggers keep the stream that they are given first, and here that would be one of this test."""
    monkeypatch.setattr("headrace.base.logs.configure", lambda **_options: "console")


async def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = await asyncio.to_thread(main, ["streams", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


async def test_streams_are_planned_applied_shown_and_purged_from_the_command_line(
    nats_server: EmbeddedServer, connect: Connect, subjects: Subjects, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ("--nats", nats_server.url, "--prefix", subjects.prefix)
    req = subjects.stream("REQ")
    code, out, _ = await run(capsys, "plan", *server)
    assert (code, f"create   {req}" in out) == (0, True)
    code, out, _ = await run(capsys, "apply", "--json", *server)
    assert {entry["action"] for entry in json.loads(out)} == {"create"}
    code, out, _ = await run(capsys, "plan", *server)
    assert (code, out) == (0, "26 of 26 as they should be, nothing to do\n")

    connection = await connect()
    await connection.publish(subjects.req("p", "hi"), b"x")
    await connection.ensure_consumer(request_consumer(subjects, "p", "hi"))
    code, out, _ = await run(capsys, "status", *server)
    assert f"{req} " in out
    assert "REQ_p_hi" in out
    code, out, _ = await run(capsys, "status", "--json", *server)
    by_name = {entry["stream"]: entry for entry in json.loads(out)}
    assert by_name[req]["messages"] == 1
    assert by_name[req]["consumers"][0]["waiting_messages"] == 1

    code, _, err = await run(capsys, "purge", "req", *server)
    assert (code, "--yes" in err) == (1, True)
    code, out, _ = await run(capsys, "purge", "req", "--yes", "--json", *server)
    assert json.loads(out) == {"stream": req, "subject": None, "purged": 1}
    code, _, err = await run(capsys, "purge", "nonsense", "--yes", *server)
    assert (code, "no stream of this deployment" in err) == (1, True)
    await remove_topology(connection, Topology(subjects))


async def test_a_server_that_is_not_there_has_its_own_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = await run(capsys, "status", "--nats", "nats://127.0.0.1:1")
    assert code == 69
    assert "127.0.0.1:1" in err
