"""A continuous pull whose connection has moved to another server, while others still send to the inboxes of before."""

from __future__ import annotations

import pytest

from headrace.jetstream.client import Connection
from headrace.jetstream.errors import RequestTimeout
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import work_consumer
from tests.conftest import Connect
from tests.integration.jetstream.test_pull import running
from tests.integration.jetstream.waiting import until


async def test_messages_asked_for_at_a_server_that_was_left_are_taken_at_the_next_one(
    connection: Connection, subjects: Subjects, connect: Connect
) -> None:
    """Other servers of a cluster go on sending to the inboxes of before, by way of the server that stands still."""
    other = await connect()
    await connection.ensure_consumer(work_consumer(subjects, "p", "w"))
    refused: list[str] = []
    await other.subscribe("$JS.ACK.>", lambda message: refused.append(message.subject))
    got: list[bytes] = []
    stream, name = subjects.stream("WORK"), subjects.work_consumer("w")
    loop = connection.pull(stream, name, lambda delivery: got.append(delivery.data), credit=3, expires_s=60)
    async with running(loop):
        await until(lambda: loop.outstanding == 3)
        inboxes = [loop._inbox]
        loop._renew("silent")  # as it does when it hears nothing
        loop._schedule()
        await until(lambda: loop.outstanding == 3)
        inboxes.append(loop._inbox)
        await connection._core.leave()
        await until(lambda: connection.connected and loop.outstanding == 3)
        await connection.barrier()
        assert loop._inbox not in inboxes
        for n, inbox in enumerate((*inboxes, *inboxes), 1):
            with pytest.raises(RequestTimeout):  # somebody listens there, and says nothing
                await other.request(inbox, b"no delivery", timeout_s=0.05)
            (tap,) = [tap for tap in connection._core._subs.values() if tap.subject == inbox]
            tap.handler(inbox.encode(), f"$JS.ACK.{stream}.{name}.1.{n}.{n}.0.0".encode(), b"%d" % n, None)
        await until(lambda: bool(refused))
        assert (got, loop.credit) == ([b"1", b"2", b"3"], 0)
        assert refused == [f"$JS.ACK.{stream}.{name}.1.4.4.0.0"]
