"""Storing messages, with what can go wrong about it."""

import asyncio
import time

import pytest

from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import (
    DiskFull,
    PayloadTooLarge,
    PublishUnknown,
    QueueFull,
    RevisionConflict,
    SubjectError,
    TopologyError,
)
from headrace.jetstream.ports import Outgoing, PubAck
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.settings import ServerSettings
from headrace.jetstream.specs import StreamSpec
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from tests.conftest import Connect


async def stream(connection: Connection, spec: StreamSpec) -> None:
    await connection.api.call(f"STREAM.CREATE.{spec.name}", spec.config())


async def test_a_stored_message_is_acknowledged_with_its_place(connection: Connection, subjects: Subjects) -> None:
    headers = {"Hr-Attempt": "2"}
    first = await connection.publish(subjects.work("p", "w"), b"x", headers=headers, msg_id="a", ttl_s=3.2)
    second = await connection.publish(subjects.work("p", "w"), b"x", msg_id="a")
    assert (first.stream, first.seq, first.duplicate) == (subjects.stream("WORK"), 1, False)
    assert (second.seq, second.duplicate) == (1, True)
    assert headers == {"Hr-Attempt": "2"}  # trap 6: the plain client writes its own into the caller's
    stored = await connection.get_message(first.stream, 1)
    assert stored is not None
    assert stored.headers == {"Hr-Attempt": "2", "Nats-Msg-Id": "a", "Nats-TTL": "4"}  # trap 6: rounded up, never to 0


async def test_many_publishes_in_flight_each_get_their_own_answer(connection: Connection, subjects: Subjects) -> None:
    acks = await asyncio.gather(*(connection.publish(subjects.work("p", "w"), b"%d" % n) for n in range(300)))
    assert [a.seq for a in acks] == list(range(1, 301))


async def test_a_full_queue_says_which_limit_was_hit(connection: Connection, subjects: Subjects, prefix: str) -> None:
    """1.1: three different limits share one error code, and a full disk shares it too."""
    base = {"retention": "workqueue", "discard": "new", "description": "x"}
    per_subject = {"max_msgs_per_subject": 1, "discard_new_per_subject": True}
    for kind, limits in (("subject", per_subject), ("stream", {"max_msgs": 1}), ("bytes", {"max_bytes": 200})):
        await stream(connection, StreamSpec(name=f"{prefix}_{kind}", subjects=(f"{prefix}.full.{kind}.*",), **base, **limits))  # type: ignore[arg-type]
        subject = f"{prefix}.full.{kind}.a"
        await connection.publish(subject, bytes(100))
        with pytest.raises(QueueFull, match="full") as caught:
            await connection.publish(subject, bytes(100))
        assert (caught.value.scope, caught.value.subject) == (kind, subject)
    await connection.publish(f"{prefix}.full.subject.b", b"")  # another subject has its own room


async def test_the_cap_of_a_tenant_is_its_own_and_moved_work_has_none(connect: Connect, subjects: Subjects) -> None:
    connection = await connect(topology=Topology(subjects, tenant_cap=2))
    for _ in range(2):
        await connection.publish(subjects.req("p", "std", "a"), b"")
    with pytest.raises(QueueFull) as caught:
        await connection.publish(subjects.req("p", "std", "a"), b"", msg_id="refused")
    assert caught.value.scope == "subject"
    await connection.publish(subjects.req("p", "std", "b"), b"")
    await connection.publish(subjects.req("p", "hi", "a"), b"")
    for _ in range(5):
        await connection.publish(subjects.req("p", "re", "a"), b"")
    await connection.delete_message(subjects.stream("REQ"), 1)
    ack = await connection.publish(subjects.req("p", "std", "a"), b"", msg_id="refused")
    assert not ack.duplicate  # a refused publish does not burn its id


async def test_a_full_disk_is_told_from_a_full_queue(tmp_path, connect: Connect, prefix: str) -> None:  # type: ignore[no-untyped-def]
    with EmbeddedServer(tmp_path, ServerSettings(max_file_store="64KB")) as small:
        connection = await connect(small)
        await stream(connection, StreamSpec(name=f"{prefix}_D", subjects=(f"{prefix}.d",), description="x"))
        with pytest.raises(DiskFull):  # noqa: PT012  # which of them is the first too many is the server's business
            for _ in range(20):
                await connection.publish(f"{prefix}.d", bytes(10_000))


async def test_compare_and_set_on_a_subject_can_be_lost(connection: Connection, subjects: Subjects) -> None:
    subject = subjects.result("_", "job")
    await connection.publish(subject, b"first", expect_last_subject_seq=0)
    with pytest.raises(RevisionConflict, match="job"):
        await connection.publish(subject, b"second", expect_last_subject_seq=0)


async def test_a_subject_without_stream_is_known_before_the_timeout(connection: Connection, prefix: str) -> None:
    started = time.monotonic()
    with pytest.raises(TopologyError, match="nowhere"):
        await connection.publish(f"{prefix}.nowhere", b"", timeout_s=10.0)
    assert time.monotonic() - started < 5.0


async def test_a_missing_responder_is_tried_again(connection: Connection, prefix: str) -> None:
    """Trap 11: a stream that comes a moment later, as after an election. The plain client fails at once."""
    publishing = asyncio.ensure_future(connection.publish(f"{prefix}.late", b""))
    await asyncio.sleep(0.03)
    await stream(connection, StreamSpec(name=f"{prefix}_L", subjects=(f"{prefix}.late",), description="x"))
    assert (await publishing).seq == 1


async def test_a_header_that_breaks_the_line_is_refused(connection: Connection, subjects: Subjects) -> None:
    with pytest.raises(SubjectError):
        await connection.publish(subjects.work("p", "w"), b"", headers={"A": "b\r\nNats-TTL: 1"})


async def test_a_cancelled_publish_leaves_nothing_behind(connection: Connection, subjects: Subjects) -> None:
    publishing = asyncio.ensure_future(connection.publish(subjects.work("p", "w"), b""))
    await asyncio.sleep(0)
    publishing.cancel()
    await asyncio.wait([publishing])
    assert connection._mux._calls == {}
    await connection.barrier()


async def test_messages_that_are_stored_together_each_have_their_own_outcome(
    connection: Connection, subjects: Subjects
) -> None:
    subject = subjects.work("p", "w")
    result = subjects.result("_", "job")
    outcomes = await connection.publish_all(
        [
            *(Outgoing(subject, b"%d" % n, {"Hr-Attempt": str(n)}, msg_id=f"m{n % 2}") for n in range(3)),
            Outgoing(result, b"first", expect_last_subject_seq=0),
            Outgoing(result, b"second", expect_last_subject_seq=0),
            Outgoing(subject, bytes(2 * connection.max_payload)),
            Outgoing(subject, b"last"),
        ]
    )
    stored = [(o.seq, o.duplicate) if isinstance(o, PubAck) else type(o) for o in outcomes]
    assert stored == [(1, False), (2, False), (1, True), (1, False), RevisionConflict, PayloadTooLarge, (3, False)]
    found = await connection.get_message(subjects.stream("WORK"), 2)
    assert found is not None
    assert (found.data, found.headers) == (b"1", {"Hr-Attempt": "1", "Nats-Msg-Id": "m1"})
    assert connection._mux._calls == {}
    assert await connection.publish_all([]) == []


async def test_messages_that_are_stored_together_wait_for_their_stream(connection: Connection, prefix: str) -> None:
    publishing = asyncio.ensure_future(connection.publish_all([Outgoing(f"{prefix}.late", b"")] * 3))
    await asyncio.sleep(0.03)
    await stream(connection, StreamSpec(name=f"{prefix}_L", subjects=(f"{prefix}.late",), description="x"))
    assert sorted(ack.seq for ack in await publishing if isinstance(ack, PubAck)) == [1, 2, 3]


# -- the server goes away ---------------------------------------------------------------------------------------------------


async def test_a_publish_caught_by_a_crash_is_repeated_under_its_id(
    own_server: EmbeddedServer, connect: Connect, subjects: Subjects
) -> None:
    """Trap 3: accepted in the instant of the crash, lost, and its future pending for ever."""
    connection = await connect(own_server, topology=Topology(subjects))
    own_server.pause()  # takes the bytes, answers nothing
    publishing = [
        asyncio.ensure_future(connection.publish(subjects.work("p", "w"), b"", msg_id=f"m{n}", timeout_s=5.0)) for n in range(3)
    ]
    await asyncio.sleep(0.02)
    own_server.kill()
    await own_server.start_async()
    acks = await asyncio.gather(*publishing)
    assert len({a.seq for a in acks}) == 3
    again = await connection.publish(subjects.work("p", "w"), b"", msg_id="m0")
    assert (again.duplicate, again.seq) == (True, acks[0].seq)
    assert await connection.subject_counts(subjects.stream("WORK"), ">") == {subjects.work("p", "w"): 3}


async def test_messages_that_are_stored_together_are_repeated_by_their_ids_after_a_crash_and_others_are_unknown(
    own_server: EmbeddedServer, connect: Connect, subjects: Subjects
) -> None:
    connection = await connect(own_server, topology=Topology(subjects))
    own_server.pause()
    messages = [Outgoing(subjects.work("p", "w"), b"", msg_id=f"m{n}" if n % 2 else None) for n in range(6)]
    publishing = asyncio.ensure_future(connection.publish_all(messages, timeout_s=5.0))
    await asyncio.sleep(0.02)
    own_server.kill()
    await own_server.start_async()
    outcomes = await publishing
    assert [type(outcome) for outcome in outcomes] == [PublishUnknown, PubAck] * 3
    assert subjects.work("p", "w") not in {call.subject for call in connection._mux._calls.values()}


async def test_messages_that_are_stored_together_and_hear_nothing_end_in_time_as_unknown(
    own_server: EmbeddedServer, connect: Connect, subjects: Subjects
) -> None:
    connection = await connect(own_server, topology=Topology(subjects))
    messages = [Outgoing(subjects.work("p", "w"), b"", msg_id=f"m{n}") for n in range(3)]
    own_server.pause()
    try:
        outcomes = await connection.publish_all(messages, timeout_s=0.1)
    finally:
        own_server.resume()
    assert [type(outcome) for outcome in outcomes] == [PublishUnknown] * 3
    assert all(isinstance(ack, PubAck) and ack.duplicate for ack in await connection.publish_all(messages))


async def test_a_publish_that_hears_nothing_ends_in_time_as_unknown(
    own_server: EmbeddedServer, connect: Connect, subjects: Subjects
) -> None:
    """Trap 3. What was unknown may be stored; repeating it under the same id tells."""
    connection = await connect(own_server, topology=Topology(subjects))
    own_server.pause()
    try:
        with pytest.raises(PublishUnknown):
            await connection.publish(subjects.work("p", "w"), b"", msg_id="m", timeout_s=0.1)
    finally:
        own_server.resume()
    assert (await connection.publish(subjects.work("p", "w"), b"", msg_id="m")).duplicate


async def test_without_an_id_a_broken_publish_is_not_repeated(
    own_server: EmbeddedServer, connect: Connect, subjects: Subjects
) -> None:
    connection = await connect(own_server, topology=Topology(subjects))
    own_server.pause()
    publishing = asyncio.ensure_future(connection.publish(subjects.work("p", "w"), b"", timeout_s=5.0))
    await asyncio.sleep(0.02)
    own_server.kill()
    with pytest.raises(PublishUnknown):
        await publishing


async def cut_off(server: EmbeddedServer, connect: Connect, subjects: Subjects) -> Connection:
    """A connection whose server is gone, and which knows it."""
    connection = await connect(server, topology=Topology(subjects))
    server.kill()
    while connection.connected:
        await asyncio.sleep(0.005)
    return connection


@pytest.mark.slow
async def test_a_publish_while_down_waits_for_the_server(
    own_server: EmbeddedServer, connect: Connect, subjects: Subjects
) -> None:
    connection = await cut_off(own_server, connect, subjects)
    with pytest.raises(PublishUnknown, match="not connected"):
        await connection.publish(subjects.work("p", "w"), b"", timeout_s=0.05)
    publishing = asyncio.ensure_future(connection.publish(subjects.work("p", "w"), b"", timeout_s=5.0))
    await own_server.start_async()
    assert (await publishing).seq == 1


async def test_time_that_runs_out_while_there_is_no_connection_leaves_no_error_behind(
    own_server: EmbeddedServer, connect: Connect, subjects: Subjects
) -> None:
    """The timer may strike just before the wait for the connection ends: nobody waits for an answer then."""
    connection = await cut_off(own_server, connect, subjects)
    publishing = asyncio.ensure_future(connection.publish(subjects.work("p", "w"), b"", timeout_s=0.2))
    await asyncio.sleep(0.01)
    (call,) = connection._mux._calls.values()
    assert call.future is None  # or asyncio would report what it is told, since nobody reads it
    connection._mux._expire_publish(call)
    with pytest.raises(PublishUnknown):
        await publishing


async def test_memory_streams_are_made_again_after_a_restart(
    own_server: EmbeddedServer, connect: Connect, subjects: Subjects
) -> None:
    topology = Topology(subjects)
    connection = await connect(own_server, topology=topology)
    await connection.publish(subjects.work("p", "w"), b"kept")
    made = asyncio.Event()

    async def again() -> None:
        await ensure_topology(connection, topology)
        made.set()

    connection.on_reconnect(again)
    own_server.kill()
    await own_server.start_async()
    async with asyncio.timeout(3.0):
        await made.wait()
    connection.send(subjects.load("p", "w"), b"load")
    await connection.barrier()
    (report,) = await connection.subject_messages(subjects.stream("LOAD"), subjects.load("p", "w"))
    assert report.data == b"load"
    (kept,) = await connection.subject_messages(subjects.stream("WORK"), subjects.work("p", "w"))
    assert kept.data == b"kept"
