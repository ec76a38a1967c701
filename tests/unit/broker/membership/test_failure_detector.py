"""Who looks after whom, when a silent worker is suspected, and what a process that is gone means on the same machine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.membership import failure_detector as subject
from headrace.broker.membership.failure_detector import WATCHED, FailureDetector, watched
from headrace.broker.membership.members import machine_id
from headrace.broker.messages.members import WorkerMember
from headrace.jetstream.errors import NoResponder, NotConnected, RequestTimeout, RevisionConflict
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

    def overdue(self, _key: str) -> int:
        return 0

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


async def test_where_the_machine_is_not_known_a_process_id_says_nothing(ended: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "machine_id", lambda: "")
    world = World("present", pid=ended, machine="")
    await world.rounds()
    assert world.deleted == []


TTL_S = 60.0


class Suspect(World):
    """A worker on another machine. `answers`: what each probe in turn gets, the last one ever after."""

    def __init__(self, *answers: bool, settled: bool = True, state: KeyState = "present") -> None:
        super().__init__(state, pid=1, machine="another")
        if settled:
            self.connected_since_s -= TTL_S + 1
        self.answers = list(answers)
        self.probes = 0
        self.rounds_left = 0
        self.over = asyncio.Event()
        self.there = True
        self.on_get: Callable[[], None] = lambda: None
        self.on_probe: Callable[[], None] = lambda: None
        self.detector = FailureDetector(self, Subjects(), self, pool="p", me="me", ttl_s=TTL_S)  # type: ignore[arg-type]

    def reconnect(self) -> None:
        self.connected_since_s = asyncio.get_running_loop().time()

    def workers(self, pool: str) -> dict[str, WorkerMember]:
        return super().workers(pool) if self.there and self.lease != "deleted" else {}

    def routers(self, pool: str) -> frozenset[str]:
        self.rounds_left -= 1
        if self.rounds_left < 0:
            self.over.set()
        return super().routers(pool)

    async def request(self, subject: str, _data: bytes, *, timeout_s: float) -> bytes:
        if self.over.is_set():
            await asyncio.Event().wait()
        self.probes += 1
        self.on_probe()
        if self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]:
            return b""
        raise NoResponder(subject)

    async def get(self, key: str) -> Entry | None:
        self.on_get()
        return await super().get(key)

    async def whole_rounds(self, count: int) -> None:
        self.rounds_left = count
        self.over.clear()
        running = asyncio.create_task(self.detector.run())
        over = asyncio.create_task(self.over.wait())
        await asyncio.wait({running, over}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert not running.done()
        assert over.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "EVERY_S", 0.001)
    monkeypatch.setattr(subject, "AGAIN_S", 0.001)


@pytest.mark.usefixtures("quick")
async def test_a_worker_that_is_silent_to_four_probes_loses_its_lease() -> None:
    world = Suspect(False)
    await world.whole_rounds(1)
    assert (world.probes, world.deleted) == (4, [7])


@pytest.mark.usefixtures("quick")
async def test_a_worker_that_answers_the_last_probe_keeps_its_lease() -> None:
    world = Suspect(False, False, False, True)
    await world.whole_rounds(3)
    assert world.deleted == []


async def test_a_connection_that_is_back_before_the_next_probe_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "EVERY_S", 0.001)
    monkeypatch.setattr(subject, "AGAIN_S", 0.03)
    world = Suspect(False)
    world.on_probe = lambda: asyncio.get_running_loop().call_later(0.02, world.answers.__setitem__, 0, True)
    await world.whole_rounds(3)
    assert world.deleted == []


@pytest.mark.usefixtures("quick")
async def test_a_worker_that_has_not_answered_since_the_reconnect_is_probed_once_a_round_and_not_suspected() -> None:
    world = Suspect(False, settled=False)
    await world.whole_rounds(3)
    assert (world.probes, world.deleted) == (3, [])


@pytest.mark.usefixtures("quick")
async def test_a_worker_that_has_answered_since_the_reconnect_is_suspected() -> None:
    world = Suspect(True, False, settled=False)
    await world.whole_rounds(2)
    assert world.deleted == [7]


@pytest.mark.usefixtures("quick")
async def test_an_answer_from_before_a_reconnect_makes_no_suspect() -> None:
    world = Suspect(True)
    await world.whole_rounds(2)
    world.reconnect()
    world.answers = [False]
    await world.whole_rounds(3)
    assert world.deleted == []


@pytest.mark.usefixtures("quick")
async def test_an_answer_to_a_probe_from_before_a_reconnect_makes_no_suspect() -> None:
    world = Suspect(True, False, settled=False)

    def reconnected_meanwhile() -> None:
        world.on_probe = lambda: None
        world.connected_since_s += 0.5

    world.on_probe = reconnected_meanwhile
    await world.whole_rounds(3)
    assert world.deleted == []


@pytest.mark.usefixtures("quick")
async def test_a_reconnect_right_before_the_deletion_ends_the_suspicion() -> None:
    world = Suspect(False)
    world.on_get = world.reconnect
    await world.whole_rounds(3)
    assert world.deleted == []


@pytest.mark.usefixtures("quick")
async def test_without_a_connection_nobody_is_suspected() -> None:
    world = Suspect(False)
    world.connected = False
    await world.whole_rounds(3)
    assert world.deleted == []


@pytest.mark.usefixtures("quick")
async def test_a_lease_that_has_run_out_is_not_revoked_after_probes() -> None:
    """Only the end of its process is a fact that a record may be made of."""
    world = Suspect(False, state="expired")
    await world.whole_rounds(2)
    assert world.deleted == []


@pytest.mark.usefixtures("quick")
async def test_a_read_that_fails_ends_the_round_and_not_the_detector() -> None:
    world = Suspect(False)

    def fails_once() -> None:
        world.on_get = lambda: None
        raise NotConnected

    world.on_get = fails_once
    await world.whole_rounds(2)
    assert world.deleted == [7]


@pytest.mark.usefixtures("quick")
async def test_answers_of_workers_that_have_left_are_forgotten() -> None:
    world = Suspect(True)
    await world.whole_rounds(1)
    assert list(world.detector._answered) == ["w"]
    world.there = False
    await world.whole_rounds(1)
    assert world.detector._answered == {}


class Overdue(Suspect):
    """A worker on another machine that answers, but does not renew its lease although others do."""

    last_seen = 7

    def overdue(self, _key: str) -> int:
        return self.last_seen

    async def delete(self, key: str, *, revision: int | None = None) -> None:
        if revision != 7:
            raise RevisionConflict("it was renewed")
        await super().delete(key, revision=revision)
        self.last_seen = 0  # as the watch says


@pytest.mark.usefixtures("quick")
async def test_the_lease_of_a_worker_that_renews_it_no_more_is_revoked_at_the_revision_that_was_seen() -> None:
    world = Overdue(True)
    await world.whole_rounds(2)
    assert world.deleted == [7]


@pytest.mark.usefixtures("quick")
async def test_a_worker_that_has_just_renewed_its_lease_keeps_it() -> None:
    world = Overdue(True)
    world.last_seen = 6
    await world.whole_rounds(1)
    assert world.deleted == []
    assert world.probes, "it is probed as any other"
