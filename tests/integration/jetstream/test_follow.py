"""Following a stream, against a real server."""

import asyncio

import pytest

from headrace.jetstream import follow as following
from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import StreamTrimmed
from headrace.jetstream.ports import Follow, StoredMessage
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology


async def publish(connection: Connection, subject: str, first: int, last: int) -> None:
    for number in range(first, last + 1):
        await connection.publish(subject, str(number).encode(), msg_id=f"{subject}.{number}", timeout_s=10.0)


async def read(follow: Follow, count: int) -> list[StoredMessage]:
    found: list[StoredMessage] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            found += (await follow.next()).messages
    return found


def numbers(messages: list[StoredMessage]) -> list[int]:
    return [int(message.data) for message in messages]


async def test_everything_comes_in_order_then_what_is_new(connection: Connection, subjects: Subjects) -> None:
    stream, mine, other = subjects.stream("KV"), subjects.kv("p", "w"), subjects.kv("q", "w")
    await publish(connection, mine, 1, 300)
    await publish(connection, other, 1, 5)
    follow = connection.follow(stream, subjects.kv_filter("p"), start_seq=11, batch=32)
    found = await read(follow, 290)
    assert numbers(found) == list(range(11, 301))
    assert [m.seq for m in found] == list(range(11, 301))
    assert found[0].at > 1e9
    await publish(connection, mine, 301, 310)
    batch = await follow.next()
    assert batch.messages[0].data == b"301"
    assert follow.position == batch.position == batch.messages[-1].seq
    await follow.close()
    await connection.barrier()
    assert (await connection.api.call(f"CONSUMER.LIST.{stream}"))["total"] == 0


@pytest.mark.slow
async def test_a_slow_reader_holds_the_server_back(connection: Connection, subjects: Subjects) -> None:
    await publish(connection, subjects.kv("p", "w"), 1, 200)
    follow = connection.follow(subjects.stream("KV"), subjects.kv_filter("p"), start_seq=1, batch=16)
    first = await follow.next()
    await asyncio.sleep(0.2)
    second = await follow.next()
    assert len(second.messages) <= 32
    assert second.pending >= 200 - 16 - 32 - 16
    rest = await read(follow, 200 - len(first.messages) - len(second.messages))
    assert numbers([*first.messages, *second.messages, *rest]) == list(range(1, 201))
    await follow.close()


async def test_a_lost_delivery_is_noticed(connection: Connection, subjects: Subjects) -> None:
    """Without the check of delivery numbers the reader would be silently short of messages."""
    follow = connection.follow(subjects.stream("KV"), subjects.kv_filter("p"), start_seq=1)
    await publish(connection, subjects.kv("p", "w"), 1, 1)
    found = await read(follow, 1)
    assert follow._tap is not None
    handler = follow._tap.handler

    def deaf(*_args: object) -> None:
        assert follow._tap is not None
        follow._tap.handler = handler

    follow._tap.handler = deaf
    await publish(connection, subjects.kv("p", "w"), 2, 4)
    found += await read(follow, 3)
    assert numbers(found) == [1, 2, 3, 4]
    await follow.close()


@pytest.mark.slow
async def test_it_survives_a_restart_of_the_server(own_server: EmbeddedServer, connect, subjects: Subjects) -> None:  # type: ignore[no-untyped-def]
    connection: Connection = await connect(own_server, topology=Topology(subjects))
    follow = connection.follow(subjects.stream("KV"), subjects.kv_filter("p"), start_seq=1)
    await publish(connection, subjects.kv("p", "w"), 1, 20)
    found = await read(follow, 20)
    own_server.kill()
    own_server.start()
    await publish(connection, subjects.kv("p", "w"), 21, 40)
    found += await read(follow, 20)
    assert numbers(found) == list(range(1, 41))
    await follow.close()


async def test_messages_that_were_removed_unread_are_a_typed_condition(connection: Connection, subjects: Subjects) -> None:
    stream = subjects.stream("KV")
    await publish(connection, subjects.kv("p", "w"), 1, 10)
    assert await connection.purge_stream(stream, subject=subjects.kv_filter("p"), up_to_seq=6) == 6
    follow = connection.follow(stream, subjects.kv_filter("p"), start_seq=4)
    with pytest.raises(StreamTrimmed, match="7 to 10") as caught:
        await follow.next()
    assert (caught.value.wanted, caught.value.first_seq) == (4, 7)
    await follow.close()
    follow = connection.follow(stream, subjects.kv_filter("p"), start_seq=7)
    assert numbers(await read(follow, 4)) == [7, 8, 9, 10]
    await follow.close()
    follow = connection.follow(stream, subjects.kv_filter("p"), start_seq=50)
    with pytest.raises(StreamTrimmed, match="50"):
        await follow.next()  # the stream is another one, or was restored from something older
    await follow.close()


async def test_a_quiet_reader_moves_on_past_the_messages_of_others(
    connection: Connection, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else their removal would look like a loss."""
    monkeypatch.setattr(following, "IDLE_CHECK_S", 0.0)
    stream = subjects.stream("KV")
    await publish(connection, subjects.kv("p", "w"), 1, 1)
    follow = connection.follow(stream, subjects.kv_filter("p"), start_seq=1)
    await read(follow, 1)
    await publish(connection, subjects.kv("q", "w"), 1, 10)
    async with asyncio.timeout(20):
        batch = await follow.next()
    assert (batch.messages, batch.position) == ([], 11)
    await follow.close()


async def test_what_a_stream_holds(connection: Connection, subjects: Subjects) -> None:
    stream = subjects.stream("KV")
    empty = await connection.stream_state(stream, subject=subjects.kv_filter("p"))
    assert (empty.messages, empty.last_seq, empty.last_of_subject) == (0, 0, 0)
    await publish(connection, subjects.kv("p", "w"), 1, 3)
    await publish(connection, subjects.kv("q", "w"), 1, 2)
    state = await connection.stream_state(stream, subject=subjects.kv_filter("p"))
    assert (state.first_seq, state.last_seq, state.messages, state.last_of_subject) == (1, 5, 5, 3)
    assert state.created == empty.created
    assert await connection.purge_stream(stream) == 5
    state = await connection.stream_state(stream)
    assert (state.first_seq, state.last_seq, state.messages) == (6, 5, 0)


async def test_the_server_sends_each_message_to_a_connection_once(connection: Connection, subjects: Subjects) -> None:
    """No inbox of a reader may match the subscription for single answers, or its messages come twice and one is dropped."""
    core, received = connection._core, list[bytes]()

    def counted(sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        received.append(data)
        core._on_message(sid, subject, reply, data, headers)

    core._ps._on_message = counted
    stream, mine = subjects.stream("KV"), subjects.kv("p", "w")
    await publish(connection, mine, 1, 3)
    bucket = connection.bucket(subjects.bucket("models"))
    seen: list[bytes] = []
    watch = bucket.watch(lambda change: seen.append(change.value or b""))
    watching = asyncio.ensure_future(watch.run())
    follow = connection.follow(stream, subjects.kv_filter("p"), start_seq=1)
    try:
        await bucket.put("one", b"watched")
        assert numbers(await read(follow, 3)) == [1, 2, 3]
        async with asyncio.timeout(10):
            while b"watched" not in seen:
                await asyncio.sleep(0.01)
        assert [m.data for m in await connection.last_messages(stream, [mine, subjects.kv("p", "absent")])] == [b"3"]
        await connection.barrier()
        assert [received.count(data) for data in (b"1", b"2", b"3", b"watched")] == [1, 1, 2, 1]  # 3: followed, then read
    finally:
        await follow.close()
        watching.cancel()
