"""Who looks after whom, and what a member does about a worker of its own machine whose process is gone."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.membership.failure_detector import WATCHED, FailureDetector, watched
from headrace.broker.membership.local_processes import machine_id
from headrace.broker.messages import WorkerMember
from headrace.jetstream.errors import RequestTimeout
from headrace.jetstream.ports import Entry, KeyState
from headrace.jetstream.subjects import Subjects

NAMES = st.sets(st.text("abcdefgh", min_size=1, max_size=3), min_size=1, max_size=12)


def test_each_looks_after_the_next_two_workers() -> None:
    workers = {"a", "c", "e"}
    assert watched("a", [], workers) == ["c", "e"]
    assert watched("e", [], workers) == ["a", "c"]
    assert watched("b", ["b", "d"], workers) == ["c", "e"]
    assert watched("a", [], {"a"}) == []


@given(NAMES, NAMES)
def test_every_worker_is_looked_after_by_two_of_the_others_if_there_are_two(workers: set[str], routers: set[str]) -> None:
    routers -= workers
    everybody = workers | routers
    by = {me: watched(me, sorted(routers), workers) for me in everybody}
    for me, names in by.items():
        assert me not in names
        assert set(names) <= workers
        assert len(names) == min(WATCHED, len(workers - {me}))
    for worker in workers:
        assert sum(worker in names for names in by.values()) >= min(WATCHED, len(workers) - 1)
        if len(everybody) > 1:
            assert any(worker in names for names in by.values()), (worker, by)


class World:
    """The connection, the bucket and the members as the detector sees them, right after a reconnect."""

    def __init__(self, state: KeyState, *, pid: int, machine: str) -> None:
        self.connected = True
        self.connected_since_s = asyncio.get_running_loop().time()
        self.lease = state
        self.deleted: list[int | None] = []
        self.member = WorkerMember(worker="w", pool="p", model="m", pid=pid, machine=machine)

    def bucket(self, _name: str) -> World:
        return self

    def workers(self, _pool: str) -> dict[str, WorkerMember]:
        return {"w": self.member}

    def routers(self, _pool: str) -> frozenset[str]:
        return frozenset()

    async def request(self, subject: str, _data: bytes, *, timeout_s: float) -> bytes:
        raise RequestTimeout(f"{subject} did not answer within {timeout_s} s")

    async def get(self, key: str) -> Entry | None:
        return Entry(key, b"", 7) if self.lease == "present" else None

    async def state(self, _key: str) -> KeyState:
        return self.lease

    async def delete(self, _key: str, *, revision: int | None = None) -> None:
        self.deleted.append(revision)
        self.lease = "deleted"

    async def rounds(self) -> None:
        detector = FailureDetector(self, Subjects(), self, pool="p", me="me", ttl_s=4.0)  # type: ignore[arg-type]
        running = asyncio.create_task(detector.run())
        await asyncio.sleep(0.6)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
def ended() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.mark.parametrize(("state", "deleted"), [("present", [7]), ("expired", [None]), ("unknown", [None]), ("deleted", [])])
async def test_the_lease_of_a_process_that_is_gone_is_deleted_right_after_a_reconnect(
    ended: int, state: KeyState, deleted: list[int | None]
) -> None:
    world = World(state, pid=ended, machine=machine_id())
    await world.rounds()
    assert world.deleted == deleted


async def test_of_another_machine_a_process_id_says_nothing(ended: int) -> None:
    for machine in ("", "another boot pid:[1]"):
        world = World("present", pid=ended, machine=machine)
        await world.rounds()
        assert world.deleted == []


async def test_a_process_that_is_there_keeps_its_lease() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        world = World("unknown", pid=child.pid, machine=machine_id())
        await world.rounds()
        assert world.deleted == []
    finally:
        child.kill()
        child.communicate()
