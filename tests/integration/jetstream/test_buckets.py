"""Buckets and watches against a real server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import nats
import nats.js.errors
import pytest

from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import RequestTimeout, RevisionConflict, SubjectError, TopologyError
from headrace.jetstream.lease import lease_gone
from headrace.jetstream.ports import Bucket, Change, Watch
from headrace.jetstream.provision import status
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.jetstream.watch import KvBucket
from tests.conftest import Connect
from tests.integration.jetstream.waiting import until


@pytest.fixture
def members(connection: Connection, subjects: Subjects) -> KvBucket:
    return connection.bucket(subjects.bucket("members"))


@contextlib.asynccontextmanager
async def running(*parts: Any) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(part.run()) for part in parts]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]


# -- keys ---------------------------------------------------------------------------------------------------------------------


async def test_a_key_is_created_once_changed_by_revision_and_deleted(members: KvBucket) -> None:
    bucket: Bucket = members
    assert await bucket.get("a.b") is None
    first = await bucket.create("a.b", b"1")
    with pytest.raises(RevisionConflict, match=r"a\.b"):
        await bucket.create("a.b", b"2")
    second = await bucket.update("a.b", b"2", revision=first)
    with pytest.raises(RevisionConflict):
        await bucket.update("a.b", b"3", revision=first)
    with pytest.raises(RevisionConflict):
        await bucket.delete("a.b", revision=first)
    entry = await bucket.get("a.b")
    assert entry is not None
    assert (entry.key, entry.value, entry.revision) == ("a.b", b"2", second)
    await bucket.delete("a.b", revision=second)
    assert await bucket.get("a.b") is None
    assert await bucket.entries() == []
    await bucket.create("a.b", b"again")
    await bucket.put("a.b", b"any")


@pytest.mark.slow
async def test_an_expired_key_is_absent_and_can_be_made_again(
    members: KvBucket, nats_server: EmbeddedServer, subjects: Subjects
) -> None:
    """Trap 1: the plain client returns a live entry without a value, and refuses to create the key."""
    revision = await members.create("a", b"1", ttl_s=1.0)
    await members.create("b", b"1")
    async with asyncio.timeout(3.0):
        while await members.get("a") is not None:
            await asyncio.sleep(0.05)
    assert await lease_gone(members, "a", ttl_s=4.0)
    assert not await lease_gone(members, "b", ttl_s=4.0)
    assert [e.key for e in await members.entries()] == ["b"]

    plain = await nats.connect(nats_server.url)
    naive = await plain.jetstream().key_value(subjects.bucket("members"))
    assert (await naive.get("a")).operation is None
    with pytest.raises(nats.js.errors.KeyWrongLastSequenceError):
        await naive.create("a", b"2")
    await plain.close()

    with pytest.raises(RevisionConflict):
        await members.update("a", b"zombie", revision=revision)
    assert await members.create("a", b"2") > revision


async def test_entries_are_listed_by_pattern_and_beyond_one_read(members: KvBucket) -> None:
    """The server answers for at most 1024 subjects at once."""
    for start in range(0, 1200, 300):
        await asyncio.gather(*(members.put(f"worker.p.{n}", b"%d" % n) for n in range(start, start + 300)))
    await members.put("ingress.i", b"x")
    assert len(await members.entries()) == 1201
    assert len(await members.entries("worker.p.*")) == 1200
    assert [e.value for e in await members.entries("ingress.>")] == [b"x"]
    assert [e.value for e in await members.entries("worker.p.7")] == [b"7"]
    assert await members.entries("router.>") == []


async def test_a_bucket_that_does_not_exist_is_named(connection: Connection) -> None:
    for call in (
        connection.bucket("nope").get("a"),
        connection.bucket("nope").put("a", b""),
        connection.bucket("nope").entries(),
    ):
        with pytest.raises(TopologyError, match="nope"):
            await call


async def test_a_key_cannot_reach_beyond_its_bucket(members: KvBucket) -> None:
    for key in ("a.*", ">", "a b", ""):
        with pytest.raises(SubjectError):
            await members.put(key, b"")


# -- watches ------------------------------------------------------------------------------------------------------------------


def tell(changes: list[Change]) -> list[tuple[str, bytes | None, str]]:
    return [(c.key, c.value, c.kind) for c in changes]


async def test_a_watch_lists_and_then_follows(members: KvBucket) -> None:
    await members.put("a", b"1")
    await members.put("gone", b"1")
    await members.delete("gone")
    seen: list[Change] = []
    watch: Watch = members.watch(seen.append)
    async with running(watch):
        await watch.ready(2.0)
        assert tell(seen) == [("a", b"1", "put")]
        await members.put("b", b"2", ttl_s=1.0)
        await members.delete("a")
        await until(lambda: len(seen) == 4)
    assert tell(seen)[1:] == [("b", b"2", "put"), ("a", None, "delete"), ("b", None, "expired")]


async def test_a_watch_of_an_empty_bucket_is_ready(members: KvBucket) -> None:
    seen: list[Change] = []
    watch = members.watch(seen.append, "worker.>")
    async with running(watch):
        await watch.ready(2.0)
        await members.put("ingress.i", b"")
        await members.put("worker.p.w", b"")
        await until(lambda: bool(seen))
        assert [c.key for c in seen] == ["worker.p.w"]


async def test_a_deletion_is_reported_of_a_key_that_was_not_there(members: KvBucket) -> None:
    """Of a lease that has run out, or that a restarted server has forgotten, it says that it does not come back."""
    await members.delete("before")
    seen: list[Change] = []
    watch = members.watch(seen.append)
    async with running(watch):
        await watch.ready(2.0)
        await members.delete("worker.p.w")
        await until(lambda: bool(seen))
        assert [(c.key, c.kind) for c in seen] == [("worker.p.w", "delete")]


async def test_a_watch_of_nothing_is_not_ready(connection: Connection) -> None:
    watch = connection.bucket("nope").watch(lambda c: None)
    async with running(watch):
        with pytest.raises(RequestTimeout):
            await watch.ready(0.1)


@pytest.mark.slow
async def test_a_watch_sees_the_first_change_after_a_restart_soon(
    own_server: EmbeddedServer, connect: Connect, subjects: Subjects
) -> None:
    """Trap 2: the plain watch is stale for 18 s and skips what happened meanwhile."""
    connection = await connect(own_server, topology=Topology(subjects))
    bucket = connection.bucket(subjects.bucket("state"))
    seen: list[Change] = []
    watch = bucket.watch(seen.append)
    plain = await nats.connect(own_server.url, error_cb=_ignore, reconnect_time_wait=0.05)
    naive = await (await plain.jetstream().key_value(subjects.bucket("state"))).watchall()
    async with running(watch):
        await watch.ready(2.0)
        await bucket.put("stays", b"1")
        await bucket.put("goes", b"1")
        await until(lambda: len(seen) == 2)
        own_server.kill()
        await own_server.start_async()
        await until(lambda: connection.connected and plain.is_connected)
        await bucket.delete("goes")
        revision = await bucket.put("new", b"2")
        await until(lambda: len(seen) == 4, timeout_s=1.5)
        assert sorted(tell(seen)[2:]) == [("goes", None, "delete"), ("new", b"2", "put")]
        old = []
        with contextlib.suppress(nats.errors.TimeoutError):
            while True:
                old.append(await naive.updates(timeout=0.3))
        assert revision not in [entry.revision for entry in old if entry is not None]
    await plain.close()


async def _ignore(_error: Exception) -> None:
    pass


@pytest.mark.slow
async def test_keys_that_vanished_while_nobody_looked_are_reported(
    own_server: EmbeddedServer, connect: Connect, subjects: Subjects
) -> None:
    """Even their markers are gone: only the listing can tell."""
    connection = await connect(own_server, topology=Topology(subjects))
    bucket = connection.bucket(subjects.bucket("state"))
    seen: list[Change] = []
    watch = bucket.watch(seen.append)
    async with running(watch):
        await bucket.put("a", b"1")
        await bucket.put("b", b"1")
        await watch.ready(2.0)
        await until(lambda: len(seen) == 2)
        other = await connect(own_server)
        connection._core.mark_down()
        await other.api.call(f"STREAM.PURGE.KV_{subjects.bucket('state')}", {"filter": f"$KV.{subjects.bucket('state')}.a"})
        connection._on_up(first=True)
        await until(lambda: len(seen) == 3)
    assert tell(seen)[2] == ("a", None, "missing")


async def test_a_lost_consumer_is_replaced_without_a_reconnect(
    connection: Connection, subjects: Subjects, members: KvBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two heartbeats missed, of half a second each; here they are shorter."""
    monkeypatch.setattr("headrace.jetstream.watch.HEARTBEAT_S", 0.1)
    monkeypatch.setattr("headrace.jetstream.watch.SILENCE_S", 0.25)
    seen: list[Change] = []
    watch = members.watch(seen.append)
    stream = f"KV_{subjects.bucket('members')}"
    async with running(watch):
        await watch.ready(2.0)
        await connection.delete_consumer(stream, watch._consumer)
        await members.put("a", b"1")
        await until(lambda: bool(seen), timeout_s=2.5)


@pytest.mark.slow
async def test_watches_leave_no_consumers_behind(own_server: EmbeddedServer, connect: Connect, subjects: Subjects) -> None:
    """Trap 2: anonymous watchers recreated in a loop fill the server with orphans."""
    topology = Topology(subjects)
    connection = await connect(own_server, topology=topology)
    bucket = connection.bucket(subjects.bucket("members"))
    stream = f"KV_{subjects.bucket('members')}"

    async def consumers() -> int:
        return next(len(s.consumers) for s in await status(connection, topology) if s.stream == stream)

    watches = [bucket.watch(lambda c: None) for _ in range(10)]
    async with running(*watches):
        for watch in watches:
            await watch.ready(2.0)
        for _ in range(3):
            await connection._core.force_reconnect()
            await until(lambda: connection.connected)
            await until(lambda: all(not w._broken and w._listed is None for w in watches))
        assert await consumers() == 10
    await connection.barrier()
    assert await consumers() == 0


async def test_a_failing_reader_does_not_stop_the_listing(members: KvBucket) -> None:
    for key in "abc":
        await members.put(key, b"")
    seen: list[str] = []

    def reader(change: Change) -> None:
        seen.append(change.key)
        raise RuntimeError("bug")

    watch = members.watch(reader)
    async with running(watch):
        await watch.ready(2.0)
    assert sorted(seen) == ["a", "b", "c"]
