"""Leases against a real server: gained, kept, lost and taken over."""

import asyncio

import pytest

from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import LeaseLost
from headrace.jetstream.lease import LeaseKeeper, lease_gone
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.jetstream.watch import KvBucket
from tests.conftest import Connect
from tests.integration.jetstream.test_buckets import running
from tests.integration.jetstream.waiting import until


@pytest.fixture
def members(connection: Connection, subjects: Subjects) -> KvBucket:
    return connection.bucket(subjects.bucket("members"))


class Holder:
    """A keeper and what it reported."""

    def __init__(self, connection: Connection, subjects: Subjects, value: bytes, *, ttl_s: float = 1.0) -> None:
        self.events: list[str] = []
        self.keeper = LeaseKeeper(
            connection,
            subjects.bucket("members"),
            "worker.p.w",
            value,
            ttl_s=ttl_s,
            on_change=lambda held: self.events.append("gained" if held else "lapse"),
        )

    async def run(self) -> None:
        await self.keeper.run()


async def test_a_lease_is_gained_kept_changed_and_released(
    connection: Connection, subjects: Subjects, members: KvBucket
) -> None:
    holder = Holder(connection, subjects, b"one")
    async with running(holder):
        await holder.keeper.wait_held(2.0)
        await holder.keeper.update(b"two")
        await asyncio.sleep(1.3)  # more than its TTL
        assert holder.keeper.held
        entry = await members.get("worker.p.w")
        assert entry is not None
        assert entry.value == b"two"
        await holder.keeper.release()
        assert not holder.keeper.held
        assert await lease_gone(members, "worker.p.w", ttl_s=4.0)
    assert holder.events == ["gained"]
    with pytest.raises(LeaseLost):
        await holder.keeper.update(b"three")


@pytest.mark.slow
async def test_a_lease_is_taken_over_only_when_its_holder_is_gone(connection: Connection, subjects: Subjects) -> None:
    first, second = Holder(connection, subjects, b"one"), Holder(connection, subjects, b"two")
    async with running(second):
        async with running(first):
            await first.keeper.wait_held(2.0) if first.keeper.held else None
            await until(lambda: first.keeper.held or second.keeper.held)
            winner, loser = (first, second) if first.keeper.held else (second, first)
            await asyncio.sleep(1.2)
            assert winner.keeper.held
            assert not loser.keeper.held
        if winner is first:
            await until(lambda: second.keeper.held)
    assert "lapse" not in winner.events


@pytest.mark.slow
async def test_a_paused_holder_fences_itself_before_others_may_take_over(
    connection: Connection, subjects: Subjects, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off from the server, it must stop believing by its own clock; back again, it learns the truth and reports once."""
    cut = await connect()
    holder = Holder(cut, subjects, b"one")
    bucket = connection.bucket(subjects.bucket("members"))
    order = holder.events
    watch = bucket.watch(lambda change: order.append("expired") if change.kind == "expired" else None)
    async with running(holder, watch):
        await holder.keeper.wait_held(2.0)
        send_now = cut._core.send_now
        monkeypatch.setattr(cut._core, "send_now", lambda cmd: True)  # everything it says gets lost
        until_s = holder.keeper.held_until_s
        await until(lambda: not holder.keeper.held)
        assert asyncio.get_running_loop().time() >= until_s
        await until(lambda: "expired" in order)
        assert order == ["gained", "lapse", "expired"]
        other = Holder(connection, subjects, b"two")
        async with running(other):
            await other.keeper.wait_held(3.0)
            monkeypatch.setattr(cut._core, "send_now", send_now)
            await asyncio.sleep(0.5)
            assert not holder.keeper.held
            await other.keeper.release()
        await until(lambda: holder.keeper.held)
    assert order == ["gained", "lapse", "expired", "gained"]


async def test_a_stolen_lease_is_noticed_at_the_next_renewal(
    connection: Connection, subjects: Subjects, members: KvBucket
) -> None:
    holder = Holder(connection, subjects, b"one", ttl_s=2.0)
    async with running(holder):
        await holder.keeper.wait_held(2.0)
        await members.put("worker.p.w", b"thief")
        await until(lambda: "lapse" in holder.events)
        assert not holder.keeper.held


async def test_a_renewal_whose_answer_was_lost_is_no_lapse(
    connection: Connection, subjects: Subjects, members: KvBucket
) -> None:
    """The write landed, so the revision is not the one we know; but the value is ours."""
    holder = Holder(connection, subjects, b"one", ttl_s=2.0)
    async with running(holder):
        await holder.keeper.wait_held(2.0)
        await members.put("worker.p.w", b"one", ttl_s=2.0)
        until_s = holder.keeper.held_until_s
        await until(lambda: holder.keeper.held_until_s > until_s)
    assert holder.events == ["gained"]


@pytest.mark.slow
async def test_a_short_restart_of_the_server_costs_no_lease(
    own_server: EmbeddedServer, connect: Connect, subjects: Subjects
) -> None:
    """The server has forgotten it, and its holder writes it again before it has run out."""
    connection = await connect(own_server, topology=Topology(subjects))
    members = connection.bucket(subjects.bucket("members"))
    holder = Holder(connection, subjects, b"one", ttl_s=2.0)
    async with running(holder):
        await holder.keeper.wait_held(2.0)
        own_server.kill()
        await own_server.start_async()
        until_s = holder.keeper.held_until_s
        await until(lambda: holder.keeper.held_until_s > until_s)
        assert not await lease_gone(members, "worker.p.w", ttl_s=30.0)
        assert not await lease_gone(members, "worker.p.other", ttl_s=30.0)  # it may be about to write its lease again
        assert await lease_gone(members, "worker.p.other", ttl_s=0.01)
    assert holder.events == ["gained"]


async def test_a_lease_that_was_taken_away_is_not_written_again_as_if_it_were_forgotten(
    connection: Connection, subjects: Subjects, members: KvBucket
) -> None:
    """The marker tells the two apart: other processes may have acted on it."""
    holder = Holder(connection, subjects, b"one", ttl_s=2.0)
    async with running(holder):
        await holder.keeper.wait_held(2.0)
        await members.delete("worker.p.w")
        assert await lease_gone(members, "worker.p.w", ttl_s=30.0)
        await until(lambda: "lapse" in holder.events)
