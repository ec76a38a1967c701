"""The continuous pull."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable

import pytest

from headrace.jetstream import wire
from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.ports import Delivery, PullLoop
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology, request_consumer, work_consumer
from tests.conftest import Connect
from tests.integration.jetstream.waiting import until


@contextlib.asynccontextmanager
async def running(*loops: PullLoop) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        for loop in loops:
            group.create_task(loop.run())
        yield
        for loop in loops:
            await loop.stop()


@pytest.fixture
async def work(connection: Connection, subjects: Subjects) -> Callable[..., PullLoop]:
    await connection.ensure_consumer(work_consumer(subjects, "p", "w"))

    def pull(on_delivery: Callable[[Delivery], None], **options: object) -> PullLoop:
        return connection.pull(subjects.stream("WORK"), subjects.work_consumer("w"), on_delivery, **options)  # type: ignore[arg-type]

    return pull


async def put(connection: Connection, subjects: Subjects, count: int, *, start: int = 0) -> None:
    await asyncio.gather(*(connection.publish(subjects.work("p", "w"), b"%d" % n) for n in range(start, start + count)))


Work = Callable[..., PullLoop]


async def test_deliveries_use_up_the_credit_and_no_more_come(connection: Connection, subjects: Subjects, work: Work) -> None:
    await put(connection, subjects, 10)
    got: list[Delivery] = []
    loop = work(got.append, credit=3)
    async with running(loop):
        await until(lambda: len(got) == 3)
        await connection.barrier()
        assert (loop.credit, len(got)) == (0, 3)
        loop.add_credit(2)
        await until(lambda: len(got) == 5)
        assert [d.data for d in got] == [b"0", b"1", b"2", b"3", b"4"]
        assert [(d.stream_seq, d.num_delivered, d.subject) for d in got[:1]] == [(1, 1, subjects.work("p", "w"))]
        assert got[0].pending == 9


async def test_what_is_asked_of_the_server_never_exceeds_the_credit(
    connection: Connection, subjects: Subjects, work: Work, connect: Connect
) -> None:
    asked: list[int] = []
    spy = await connect()
    subject = f"$JS.API.CONSUMER.MSG.NEXT.{subjects.stream('WORK')}.{subjects.work_consumer('w')}"

    await spy.subscribe(subject, lambda m: asked.append(json.loads(m.data)["batch"]))
    await spy.barrier()
    got: list[Delivery] = []
    most = 0

    def on_delivery(delivery: Delivery) -> None:
        nonlocal most
        delivery.ack()
        got.append(delivery)
        most = max(most, sum(asked) - len(got))
        loop.add_credit(1)
        assert loop.outstanding <= loop.credit  # type: ignore[attr-defined]

    loop = work(on_delivery, credit=8)
    async with running(loop):
        await put(connection, subjects, 100)
        await until(lambda: len(got) == 100)
        await connection.barrier()
        await spy.barrier()
        assert sum(asked) - 100 <= 8
        assert len(asked) < 100  # batched, not one request per message


async def test_credit_returned_one_by_one_brings_every_message(connection: Connection, subjects: Subjects, work: Work) -> None:
    await put(connection, subjects, 50)
    got: list[bytes] = []

    def on_delivery(delivery: Delivery) -> None:
        delivery.ack()
        got.append(delivery.data)
        loop.add_credit()

    loop = work(on_delivery, credit=1)
    async with running(loop):
        await until(lambda: len(got) == 50, timeout_s=2.0)  # with a pause per message this would take 25 s
    assert got == [b"%d" % n for n in range(50)]


async def test_credit_taken_back_is_taken_from_the_server_too(connection: Connection, subjects: Subjects, work: Work) -> None:
    got: list[Delivery] = []
    loop = work(got.append, credit=5)
    async with running(loop):
        await until(lambda: loop.outstanding == 5)  # type: ignore[attr-defined]
        await connection.barrier()
        loop.add_credit(-5)
        await put(connection, subjects, 3)
        await connection.barrier()
        assert (got, loop.credit) == ([], 0)
        loop.add_credit(2)
        await until(lambda: len(got) == 2)


async def test_acks_naks_delays_and_terms_do_what_they_say(connection: Connection, subjects: Subjects, work: Work) -> None:
    await put(connection, subjects, 4)
    got: list[Delivery] = []
    loop = work(got.append, credit=10)
    async with running(loop):
        await until(lambda: len(got) == 4)
        got[0].ack()
        got[1].nak()
        got[2].term("no\r\nuse")
        got[3].nak(0.15)
        await until(lambda: len(got) == 6)
        assert [(d.data, d.num_delivered) for d in got[4:]] == [(b"1", 2), (b"3", 2)]
        for delivery in got[4:]:
            delivery.progress()
            delivery.ack()
        async with asyncio.timeout(2.0):  # the server works through acks in its own time
            while await connection.subject_counts(subjects.stream("WORK"), ">"):
                await asyncio.sleep(0.005)


@pytest.mark.slow
async def test_progress_holds_off_redelivery(connection: Connection, subjects: Subjects) -> None:

    spec = dataclasses.replace(work_consumer(subjects, "p", "w"), ack_wait_s=1.0)
    await connection.ensure_consumer(spec)
    await put(connection, subjects, 1)
    got: list[Delivery] = []
    loop = connection.pull(spec.stream, spec.name, got.append, credit=5)
    async with running(loop):
        await until(lambda: len(got) == 1)
        for _ in range(12):
            await asyncio.sleep(0.1)
            got[0].progress()
        assert len(got) == 1
        await until(lambda: len(got) == 2)
        assert got[1].num_delivered == 2


async def test_a_stopped_loop_keeps_nothing_from_the_next_reader(
    connection: Connection, subjects: Subjects, work: Work
) -> None:
    first: list[Delivery] = []
    loop = work(first.append, credit=10)
    async with running(loop):
        await until(lambda: loop.outstanding == 10)  # type: ignore[attr-defined]
    await put(connection, subjects, 3)
    second: list[Delivery] = []
    async with running(work(second.append, credit=10)):
        await until(lambda: len(second) == 3, timeout_s=1.0)  # the ack wait is 3 s
    assert first == []


async def test_messages_on_their_way_to_a_stopped_loop_are_given_back(
    connection: Connection, subjects: Subjects, work: Work
) -> None:
    await put(connection, subjects, 20)
    got: list[Delivery] = []
    taken: list[Delivery] = []
    loop = work(got.append, credit=20)
    task = asyncio.ensure_future(loop.run())
    await asyncio.sleep(0)
    await loop.stop()  # the request is out, nothing has arrived
    await task
    other = work(taken.append, credit=20)
    async with running(other):
        await until(lambda: len(taken) + len(got) == 20, timeout_s=1.0)


@pytest.mark.slow
async def test_an_idle_loop_does_not_spin(connection: Connection, subjects: Subjects, work: Work, connect: Connect) -> None:
    asked: list[bytes] = []
    spy = await connect()
    await spy.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{subjects.stream('WORK')}.*", lambda m: asked.append(m.data))
    await spy.barrier()
    async with running(work(lambda d: None, credit=1, expires_s=0.2)):
        await asyncio.sleep(0.65)
    assert 3 <= len(asked) <= 5


async def test_a_missing_consumer_is_asked_for_gently_and_made_again(
    connection: Connection, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither "consumer deleted" nor "no such consumer" may end the loop or make it spin."""
    asked = made = 0
    send_now = connection._core.send_now

    def counting(cmd: bytes) -> bool:
        nonlocal asked
        asked += b"MSG.NEXT" in cmd
        return send_now(cmd)

    monkeypatch.setattr(connection._core, "send_now", counting)

    async def make() -> None:
        nonlocal made
        made += 1
        if made == 3:
            await connection.ensure_consumer(work_consumer(subjects, "p", "w"))

    got: list[Delivery] = []
    loop = connection.pull(subjects.stream("WORK"), subjects.work_consumer("w"), got.append, credit=5, on_missing=make)
    async with running(loop):
        await until(lambda: made == 3)
        assert asked <= 4
        await put(connection, subjects, 1)
        await until(lambda: len(got) == 1)
        await connection.delete_consumer(subjects.stream("WORK"), subjects.work_consumer("w"))
        await until(lambda: made >= 4)  # it goes on asking: on a busy machine it is further by now
        await connection.ensure_consumer(work_consumer(subjects, "p", "w"))
        await put(connection, subjects, 1, start=1)
        await until(lambda: len(got) >= 2)


async def test_messages_come_while_nobody_answers_the_question_for_the_consumer(
    connection: Connection, subjects: Subjects
) -> None:
    """In an election of a cluster the call that makes the consumer goes unanswered for seconds after the consumer is back."""
    asked = asyncio.Event()

    async def unanswered() -> None:
        asked.set()
        await asyncio.Event().wait()

    got: list[Delivery] = []
    loop = connection.pull(subjects.stream("WORK"), subjects.work_consumer("w"), got.append, credit=5, on_missing=unanswered)
    async with running(loop):
        await asyncio.wait_for(asked.wait(), 30)
        await connection.ensure_consumer(work_consumer(subjects, "p", "w"))
        await put(connection, subjects, 1)
        await until(lambda: len(got) == 1)


async def test_the_first_priority_is_served_first_and_the_last_when_alone(connection: Connection, subjects: Subjects) -> None:
    spec = request_consumer(subjects, "p", "std")
    await connection.ensure_consumer(spec)
    router: list[Delivery] = []
    worker: list[Delivery] = []
    late = connection.pull(spec.stream, spec.name, worker.append, credit=100, priority=9)
    early = connection.pull(spec.stream, spec.name, router.append, credit=100, priority=0)
    async with running(late):
        await connection.publish(subjects.req("p", "std"), b"alone")
        await until(lambda: len(worker) == 1)
        async with running(early):
            await connection.barrier()
            for _ in range(20):
                await connection.publish(subjects.req("p", "std"), b"x")
            await until(lambda: len(router) == 20)
        assert len(worker) == 1
        await connection.publish(subjects.req("p", "std"), b"back")
        await until(lambda: len(worker) == 2)


# -- the connection breaks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "restart"])
@pytest.mark.slow
async def test_a_restart_loses_no_message_and_no_credit(
    own_server: EmbeddedServer, connect: Connect, subjects: Subjects, how: str
) -> None:
    connection = await connect(own_server, topology=Topology(subjects))
    await connection.ensure_consumer(work_consumer(subjects, "p", "w"))
    got: list[bytes] = []

    def on_delivery(delivery: Delivery) -> None:
        got.append(delivery.data)
        delivery.ack()

    loop = connection.pull(subjects.stream("WORK"), subjects.work_consumer("w"), on_delivery, credit=10, expires_s=30)
    async with running(loop):
        await put(connection, subjects, 4)
        await until(lambda: len(got) == 4)
        await connection.barrier()
        if how == "kill":
            own_server.kill()
        else:
            await own_server.stop_async()
        await until(lambda: not connection.connected)
        assert (loop.credit, loop.outstanding) == (6, 0)
        await own_server.start_async()
        await until(lambda: connection.connected)
        await put(connection, subjects, 10, start=4)
        await until(lambda: loop.credit == 0, timeout_s=10)  # trap 4: a fetch would wait out its own timeout first
        await connection.barrier()
        assert sorted(got, key=int) == [b"%d" % n for n in range(10)]


async def test_a_cut_connection_does_not_double_the_credit(
    own_server: EmbeddedServer, connect: Connect, subjects: Subjects
) -> None:
    """The server lives on and still has our old requests: they must not find a reader again."""
    connection = await connect(own_server, topology=Topology(subjects))
    other = await connect(own_server)
    await connection.ensure_consumer(work_consumer(subjects, "p", "w"))
    got: list[Delivery] = []
    loop = connection.pull(subjects.stream("WORK"), subjects.work_consumer("w"), got.append, credit=2, expires_s=2.0)
    async with running(loop):
        await until(lambda: loop.outstanding == 2)
        await connection.barrier()
        await connection._core.force_reconnect()
        await until(lambda: connection.connected and loop.outstanding == 2)
        await put(other, subjects, 6)
        await until(lambda: len(got) == 2)
        await connection.barrier()
        assert (len(got), loop.credit) == (2, 0)


async def test_silence_in_spite_of_heartbeats_makes_the_loop_ask_again(
    connection: Connection, subjects: Subjects, work: Work
) -> None:
    """Trap 4: a request that the server has forgotten. Heartbeats are due ten times a second here."""
    got: list[Delivery] = []
    loop = work(got.append, credit=3, expires_s=0.2)
    async with running(loop):
        await until(lambda: loop.outstanding == 3)  # type: ignore[attr-defined]
        tap = loop._tap  # type: ignore[attr-defined]
        connection._core.send_now(b"UNSUB %d\r\n" % tap.sid)  # the server drops our requests, and we are not told
        await connection.barrier()
        await put(connection, subjects, 3)
        await until(lambda: len(got) == 3, timeout_s=1.5)


def test_a_refusal_is_no_message() -> None:
    """What tells a status from a stored message with headers."""
    assert wire.status_of(b"NATS/1.0 409 Consumer Deleted\r\n\r\n") == 409
    assert wire.status_of(b"NATS/1.0\r\nHr-Attempt: 2\r\n\r\n") == 0
