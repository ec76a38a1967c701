"""What one pool stores or does ends at most this pool's session of a router, which is then started again."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import xxhash
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from headrace.broker.codec import encode
from headrace.broker.membership.members import Members
from headrace.broker.messages.members import WorkerMember
from headrace.broker.models.cards import ModelCard
from headrace.broker.part_state import PartState
from headrace.jetstream.client import Connection
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.router import main
from headrace.router.index import snapshot
from headrace.router.index.snapshot import Kept, Pointer
from headrace.router.main import RouterProcess, builder
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.session.session import RouterSession
from headrace.router.settings import RouterOptions
from tests.integration.router.test_router import until

GOOD, BAD = "good-aaaaaaaa", "evil-aaaaaaaa"  # the same last characters: the sessions need names of their own all the same


def failures() -> float:
    return REGISTRY.get_sample_value("headrace_router_session_failures_total", {"pool": BAD}) or 0.0


async def put_card(connection: Connection, subjects: Subjects, pool: str) -> None:
    card = ModelCard(model=pool, pool=pool, context_length=100, block_size=16)
    await connection.bucket(subjects.bucket("models")).put(pool, encode(card))


@contextlib.asynccontextmanager
async def routing(connection: Connection, subjects: Subjects, build: Any = None) -> AsyncIterator[RouterProcess]:
    options = RouterOptions()
    made = builder(options, SchedulerSettings())
    process = RouterProcess(connection, subjects, options, build(made) if build else made, PartState("router"))
    running = asyncio.create_task(process.run())
    try:
        yield process
        assert not running.done(), "the router goes on"
    finally:
        running.cancel()
        await asyncio.wait([running])


def hostile_snapshot(subjects: Subjects, created: str) -> bytes:
    """A snapshot whose counts are negative and add up to nothing: a block list ends in the middle of a value."""
    entry = {"worker": "w", "epoch": 1, "previous": -1, "n": 1, "seq": 1, "complete": True}
    header = {"pool": BAD, "block_size": 16, "stream": subjects.stream("KV"), "created": created, "seq": 0, "at": 0.0}
    for back in range(1, 200):
        for pad in range(8):
            blocks = {"device": -back, "host": back}
            packed = snapshot.pack({**header, "workers": [{**entry, "worker": "w" + "x" * pad, "blocks": blocks}]})  # type: ignore[arg-type]
            start = 16 + len(packed)
            if -16 < start - 8 * back < 0 and (start - 8 * back) % 8:
                body = snapshot._FIXED.pack(snapshot.MAGIC, 1, len(packed)) + packed
                return body + xxhash.xxh3_128_digest(body)
    raise AssertionError("no such header")


async def test_a_hostile_snapshot_of_one_pool_is_left_and_all_pools_are_served(
    connection: Connection, subjects: Subjects
) -> None:
    state = await connection.stream_state(subjects.stream("KV"))
    data = hostile_snapshot(subjects, state.created)
    digest = hashlib.sha256(data).hexdigest()
    await connection.objects(subjects.bucket("snapshots")).put("evil", data)
    kept = Kept(object="evil", digest=digest, size=len(data), seq=0, at=0.0, created=state.created)
    pointer = Pointer(pool=BAD, stream=subjects.stream("KV"), block_size=16, kept=[kept])
    await connection.bucket(subjects.bucket("state")).put(f"snapshot.{BAD}", encode(pointer))
    for pool in (GOOD, BAD):
        await put_card(connection, subjects, pool)
    with capture_logs() as said:
        async with routing(connection, subjects) as process:
            await until(lambda: len(process.sessions) == 2 and all(session.ready for session in process.sessions.values()))
    assert [line["object"] for line in said if line["event"] == "snapshot.unusable"] == ["evil"]
    assert not [line for line in said if line["event"] == "session.failed"]


class Faulty:
    """A router's way to make sessions; those of the bad pool fail a while after they hold their lease, so many times."""

    def __init__(self, build: Any, times: int) -> None:
        self.build = build
        self.left = times

    def __call__(
        self, messaging: Messaging, subjects: Subjects, members: Members, card: ModelCard, router: str
    ) -> RouterSession:
        session: RouterSession = self.build(messaging, subjects, members, card, router)
        if card.pool == BAD and self.left:
            self.left -= 1

            def fails(_now_s: float) -> Any:
                raise ZeroDivisionError("a bug that this pool's data has found")

            session.window.scheduler.decide = fails  # type: ignore[method-assign]
        return session


async def test_a_session_that_fails_is_started_again_and_the_others_go_on(
    connection: Connection, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "FIRST_WAIT_S", 0.2)
    for pool in (GOOD, BAD):
        await put_card(connection, subjects, pool)
    before = failures()
    made: list[Faulty] = []
    leases = connection.bucket(subjects.bucket("members"))
    watched = Members(connection, subjects, lease_ttl_s=4.0)
    watching = asyncio.create_task(watched.run())

    def faulty(build: Any) -> Faulty:
        made.append(Faulty(build, times=2))
        return made[0]

    with capture_logs() as said:
        async with routing(connection, subjects, faulty) as process:
            await until(lambda: GOOD in process.sessions and process.sessions[GOOD].ready)
            first = process.sessions[GOOD]
            await until(lambda: failures() == before + 1)
            await until(lambda: not watched.has_router(BAD), timeout_s=3.0)  # at once, not when it runs out
            assert process.pools[BAD].failing
            assert process._describe().ready, "a fault of one pool is no fault of this process"
            assert "ZeroDivisionError" in process._describe().facts["pools"][BAD]["failure"]
            await until(lambda: BAD in process.sessions and process.sessions[BAD].ready and not made[0].left)
            await until(lambda: failures() == before + 2)
            await until(lambda: BAD in process.sessions and process.sessions[BAD].ready)
            assert "failure" not in process._describe().facts["pools"][BAD]
            assert process.sessions[GOOD] is first
            assert first.ready
            member = WorkerMember(worker="w", pool=BAD, model="m", slots=4, block_size=16)
            await leases.put(subjects.worker_key(BAD, "w"), encode(member))
            await until(lambda: process.sessions[BAD].standing()["workers"] == 1)
            assert len(process._members._callbacks) == 2, "those of sessions that failed are forgotten"
            names = {session.router for session in process.sessions.values()}
            assert len(names) == 2
    watching.cancel()
    failed = [line for line in said if line["event"] == "session.failed"]
    assert [(line["pool"], line["failures"], line["again_in_s"]) for line in failed] == [(BAD, 1, 0.2), (BAD, 2, 0.4)]
    assert all("ZeroDivisionError: a bug" in line["error"] for line in failed)


async def test_a_router_drains_while_a_session_waits_to_be_started_again(connection: Connection, subjects: Subjects) -> None:
    for pool in (GOOD, BAD):
        await put_card(connection, subjects, pool)
    before = failures()
    options = RouterOptions()
    build = Faulty(builder(options, SchedulerSettings()), times=99)
    process = RouterProcess(connection, subjects, options, build, PartState("router"))
    running = asyncio.create_task(process.run())
    await until(lambda: failures() > before and GOOD in process.sessions and process.sessions[GOOD].ready)
    await process.drain(1.0)
    async with asyncio.timeout(5):
        await running


async def test_a_change_of_the_members_reaches_all_pools_though_one_of_them_stumbles(
    connection: Connection, subjects: Subjects
) -> None:
    members = Members(connection, subjects, lease_ttl_s=4.0)
    heard: list[bool] = []

    def stumbles() -> None:
        raise RuntimeError("of another pool")

    members.on_change(stumbles)
    forget = members.on_change(lambda: heard.append(True))
    watching = asyncio.create_task(members.run())
    await members.ready(5.0)
    leases = connection.bucket(subjects.bucket("members"))
    await leases.put(subjects.worker_key("p", "w"), encode(WorkerMember(worker="w", pool="p", model="m")))
    await until(lambda: heard == [True])
    forget()
    await leases.put(subjects.worker_key("p", "w2"), encode(WorkerMember(worker="w2", pool="p", model="m")))
    await until(lambda: members.worker_live("p", "w2"))
    assert heard == [True]
    watching.cancel()
