"""What the watch of the leases says, what it means for the view of who is there, and when a lease counts as gone."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from headrace.broker.codec import encode
from headrace.broker.membership.members import GAP_S, Members, Renewals, machine_id, process_gone
from headrace.broker.messages.members import RouterMember, WorkerMember
from headrace.jetstream.errors import NotConnected
from headrace.jetstream.ports import Change, KeyState, Messaging
from headrace.jetstream.subjects import Subjects

SUBJECTS = Subjects("hr")
TTL_S = 0.05
LONG_TTL_S = 4.0
KEY = SUBJECTS.worker_key("p", "w")


class Leases:
    """A bucket whose changes the test makes up, over a connection that is old."""

    connected = True
    connected_since_s = float("-inf")
    known: KeyState = "unknown"
    age = 100.0

    async def state(self, _key: str) -> KeyState:
        return self.known

    async def age_s(self) -> float:
        return self.age

    def bucket(self, _name: str) -> Leases:
        return self

    def watch(self, on_change: Callable[[Change], None]) -> Leases:
        self.tell = on_change
        return self

    async def run(self) -> None:
        await asyncio.Event().wait()


def view(ttl_s: float = TTL_S) -> tuple[Members, Callable[[Change], None], list[bool]]:
    """The members, what tells them of a change, and whether the worker was there at each change that they passed on."""
    leases = Leases()
    members = Members(cast("Messaging", leases), SUBJECTS, lease_ttl_s=ttl_s)
    seen: list[bool] = []
    members.on_change(lambda: seen.append(members.worker_live("p", "w")))
    return members, leases.tell, seen


def put(revision: int, **fields: Any) -> Change:
    member = WorkerMember(**{"worker": "w", "pool": "p", "model": "m", "epoch": 1, **fields})
    return Change(SUBJECTS.worker_key("p", member.worker), encode(member), revision)


async def test_a_worker_whose_lease_the_server_has_forgotten_stays_for_one_ttl() -> None:
    members, tell, seen = view()
    tell(put(1))
    tell(Change(KEY, None, 1, "missing"))
    assert list(members.workers("p")) == ["w"]
    await asyncio.sleep(2 * TTL_S)
    assert list(members.workers("p")) == []
    assert seen == [True, False]


async def test_until_that_ttl_is_over_it_is_there() -> None:
    members, tell, seen = view(LONG_TTL_S)
    tell(put(1))
    tell(Change(KEY, None, 1, "missing"))
    await asyncio.sleep(0.01)
    assert (list(members.workers("p")), seen) == (["w"], [True])


async def test_a_lease_that_is_written_again_never_was_away() -> None:
    members, tell, seen = view()
    tell(put(1))
    tell(Change(KEY, None, 1, "missing"))
    tell(put(1))  # the new bucket counts from the beginning
    await asyncio.sleep(2 * TTL_S)
    assert list(members.workers("p")) == ["w"]
    assert seen == [True, True]


async def test_a_lease_that_was_deleted_or_ran_out_is_gone_at_once() -> None:
    for kind in ("delete", "expired"):
        members, tell, _ = view()
        tell(put(1))
        tell(Change(KEY, None, 2, kind))  # type: ignore[arg-type]
        assert not members.worker_live("p", "w")


@pytest.mark.parametrize(
    ("known", "age_s", "gone"),
    [
        ("present", 100.0, False),
        ("expired", 100.0, True),
        ("deleted", 0.01, True),
        ("unknown", 100.0, True),
        ("unknown", 0.01, False),
    ],
)
async def test_a_young_bucket_that_has_no_record_of_a_lease_gives_no_verdict(
    known: KeyState, age_s: float, *, gone: bool
) -> None:
    """The server was restarted: the holder may be about to write it again."""
    leases = Leases()
    leases.known, leases.age = known, age_s
    members = Members(cast("Messaging", leases), SUBJECTS, lease_ttl_s=TTL_S)
    assert await members.worker_gone("p", "w") is gone


class World:
    """The connection and the bucket as the members see them."""

    def __init__(self) -> None:
        self.connected = True
        self.connected_since_s = asyncio.get_running_loop().time()
        self.answer: KeyState | None = "expired"
        self.reads = 0
        self.bucket_age_s = 100.0
        self.members = Members(self, SUBJECTS, lease_ttl_s=LONG_TTL_S)  # type: ignore[arg-type]

    def bucket(self, _name: str) -> World:
        return self

    def watch(self, _on_change: Callable[..., None]) -> Any:
        return self

    async def state(self, _key: str) -> KeyState:
        self.reads += 1
        if self.answer is None:
            raise NotConnected
        return self.answer

    async def age_s(self) -> float:
        return self.bucket_age_s

    def settle(self) -> None:
        self.connected_since_s -= LONG_TTL_S + 0.1


@pytest.mark.parametrize(
    ("answer", "early", "settled"),
    [
        ("deleted", True, True),
        ("expired", False, True),
        ("unknown", False, True),
        ("present", False, False),
        (None, False, False),
    ],
)
async def test_only_a_deleted_lease_is_a_verdict_in_the_hold_down(answer: KeyState | None, early: bool, settled: bool) -> None:
    world = World()
    world.answer = answer
    assert await world.members.worker_gone("p", "w") is early
    world.settle()
    assert await world.members.worker_gone("p", "w") is settled


async def test_without_a_connection_there_is_no_verdict() -> None:
    world = World()
    world.answer = "deleted"
    world.connected = False
    assert not await world.members.ingress_gone("i")
    assert world.reads == 0


def test_a_renewed_lease_of_a_router_or_ingress_is_no_news() -> None:
    _, tell, seen = view()
    for key in (SUBJECTS.router_key("p", "r"), SUBJECTS.ingress_key("i")):
        seen.clear()
        for revision in (1, 2, 3):
            tell(Change(key, b"", revision))
        assert len(seen) == 1
        tell(Change(key, None, 4, "delete"))
        assert len(seen) == 2


def test_a_lease_that_cannot_be_read_is_logged_and_the_next_one_counts() -> None:
    members, tell, _ = view()
    with capture_logs() as said:
        tell(Change(KEY, b"\xc1", 1))
    assert [(line["event"], line["worker"]) for line in said] == [("member.malformed", "w")]
    assert members.workers("p") == {}
    tell(put(2))
    assert list(members.workers("p")) == ["w"]


def test_workers_are_chosen_by_role_drain_and_way_of_handing_over() -> None:
    members, tell, _ = view()
    for fields in (
        {"worker": "plain"},
        {"worker": "leaving", "draining": True},
        {"worker": "pre", "role": "prefill", "handover": "push"},
        {"worker": "pre-leaving", "role": "prefill", "handover": "push", "draining": True},
        {"worker": "pre-other", "role": "prefill", "handover": "pull"},
        {"worker": "pre-none", "role": "prefill", "handover": ""},
        {"worker": "decode", "role": "decode", "handover": "push"},
        {"worker": "enc", "role": "encode", "encoder": "e"},
        {"worker": "enc-leaving", "role": "encode", "encoder": "e", "draining": True},
        {"worker": "enc-other", "role": "encode", "encoder": "f"},
        {"worker": "enc-none", "role": "encode"},
        {"worker": "takes", "encoder": "e"},
    ):
        tell(put(1, **fields))

    def names(found: list[WorkerMember]) -> set[str]:
        return {member.worker for member in found}

    assert names(members.ready_workers("p")) == {
        *("plain", "pre", "pre-other", "pre-none", "decode", "enc", "enc-other", "enc-none", "takes")
    }
    assert names(members.serving_workers("p")) == {"plain", "decode", "takes"}
    assert names(members.encode_workers("p", "e")) == {"enc"}
    assert names(members.encode_workers("p", "")) == set()
    assert names(members.prefill_workers("p", "push")) == {"pre"}
    assert names(members.prefill_workers("p", "")) == set()


async def test_a_worker_that_comes_drains_or_goes_is_noticed_after_its_pool_was_asked_for() -> None:
    members, tell, _ = view()

    def serving() -> list[str]:
        return [member.worker for member in members.serving_workers("p")]

    assert serving() == []
    tell(put(1, worker="one"))
    assert serving() == ["one"]
    tell(put(2, worker="one", draining=True))
    assert serving() == []
    tell(put(3, worker="one"))
    assert serving() == ["one"]
    tell(Change(SUBJECTS.worker_key("p", "one"), None, 4))
    assert serving() == []


async def test_a_sleeping_worker_can_answer_where_a_router_wakes_it() -> None:
    members, tell, _ = view()
    router = SUBJECTS.router_key("p", "r")
    tell(put(1, draining=True, sleeping=1, adapters=["x"]))
    assert not members.answerable("p")
    tell(Change(router, encode(RouterMember(router="r", pool="p")), 2))
    assert not members.answerable("p"), "this router wakes nobody"
    tell(Change(router, encode(RouterMember(router="r", pool="p", wakes=True)), 3))
    assert members.answerable("p")
    assert members.answerable("p", "x")
    assert not members.answerable("p", "y")
    assert not members.waking("p")
    tell(put(4, draining=True, sleeping=1, waking=True))
    assert members.waking("p")
    tell(Change(router, None, 5, "deleted"))
    assert not members.answerable("p")
    tell(put(6))
    assert members.answerable("p")


async def test_a_lease_under_a_key_that_is_not_its_own_is_no_member() -> None:
    members, tell, _ = view()
    for key in ("worker.p.other", "worker.q.w", "worker.p.a.b", "worker.p.a b", "worker", "router.p", "x.y", "worker.p."):
        tell(Change(key, put(1).value, 1))
    assert (members.workers("p"), members.workers("q"), members.pools()) == ({}, {}, [])
    tell(put(2))
    assert list(members.workers("p")) == ["w"]


async def test_a_member_whose_lease_turns_into_rubbish_is_chosen_no_more() -> None:
    members, tell, _ = view()
    tell(put(1))
    tell(Change(KEY, b"\xc1", 2))
    assert members.workers("p") == {}


async def test_a_router_that_renews_its_lease_no_more_is_hidden_while_others_renew_and_back_with_its_next_renewal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So workers place requests on themselves before a lease has run out that is made to outlast an election."""
    monkeypatch.setattr("headrace.broker.membership.members.HIDE_EVERY_S", 0.01)
    leases = Leases()
    members = Members(cast("Messaging", leases), SUBJECTS, lease_ttl_s=60.0, overdue_s=0.3)
    changes: list[bool] = []
    key = SUBJECTS.router_key("p", "r")
    lease = encode(RouterMember(router="r", pool="p"))
    leases.tell(Change(key, lease, 1))
    members.on_change(lambda: changes.append(members.has_router("p")))
    running = asyncio.create_task(members.run())
    revision = 1
    async with asyncio.timeout(30):
        while members.has_router("p"):
            revision += 1
            leases.tell(put(revision))
            await asyncio.sleep(0.01)
    assert not changes[-1], "those who look at changes only learn of it"
    leases.tell(Change(key, lease, revision + 1))
    assert members.has_router("p")
    assert changes[-1]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_in_an_election_no_router_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.broker.membership.members.HIDE_EVERY_S", 0.01)
    monkeypatch.setattr("headrace.broker.membership.members.GAP_S", 0.05)
    leases = Leases()
    members = Members(cast("Messaging", leases), SUBJECTS, lease_ttl_s=60.0, overdue_s=0.1)
    leases.tell(Change(SUBJECTS.router_key("p", "r"), encode(RouterMember(router="r", pool="p")), 1))
    running = asyncio.create_task(members.run())
    await asyncio.sleep(0.3)
    assert members.has_router("p")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


OVERDUE_S = 4.0


def renewed(renewals: Renewals, *keys: str, first_s: float, until_s: float, every_s: float = 1.0) -> None:
    at = first_s
    while at <= until_s:
        for n, key in enumerate(keys):
            renewals.note(key, round(10 * at) + n, at)
        at += every_s


def test_a_member_is_overdue_when_it_alone_renews_no_more() -> None:
    renewals = Renewals(OVERDUE_S)
    renewed(renewals, "w", "others", first_s=0.0, until_s=10.0)
    renewed(renewals, "others", first_s=11.0, until_s=20.0)
    assert not renewals.overdue("w", 13.9)
    assert renewals.overdue("w", 14.0) == 100, "the revision that may be deleted"
    assert not renewals.overdue("others", 20.5)


def test_in_an_election_nobody_is_overdue_nor_right_after_it() -> None:
    renewals = Renewals(OVERDUE_S)
    renewed(renewals, "w", "others", first_s=0.0, until_s=10.0)
    assert not any(renewals.overdue(key, at) for key in ("w", "others") for at in (14.0, 19.0, 30.0))
    renewed(renewals, "others", first_s=19.0, until_s=30.0)  # the leader is there again
    assert not renewals.overdue("w", 22.9), "it has as long as it would have had without the election"
    assert renewals.overdue("w", 23.1)


def test_a_member_that_renews_again_is_not_overdue_and_one_that_has_left_never_is() -> None:
    renewals = Renewals(OVERDUE_S)
    renewed(renewals, "w", "v", "others", first_s=0.0, until_s=10.0)
    renewals.forget("v")
    renewed(renewals, "others", first_s=11.0, until_s=15.0)
    assert renewals.overdue("w", 15.0)
    assert not renewals.overdue("v", 15.0)
    renewals.note("w", 999, 15.5)
    assert not renewals.overdue("w", 15.5)


def test_one_whose_own_connection_was_away_says_nothing_of_others_until_it_has_watched_again() -> None:
    renewals = Renewals(OVERDUE_S)
    renewed(renewals, "w", "others", first_s=0.0, until_s=10.0)
    renewed(renewals, "others", first_s=10.0 + GAP_S + 0.1, until_s=15.0)  # what it missed meanwhile, it does not know
    assert not renewals.overdue("w", 15.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 3.0)), max_size=60), st.floats(0.0, 10.0))
def test_nobody_is_overdue_sooner_than_said(steps: list[tuple[str, float]], after_s: float) -> None:
    renewals, now, last = Renewals(OVERDUE_S), 0.0, {}
    for n, (key, wait_s) in enumerate(steps, 1):
        now += wait_s
        renewals.note(key, n, now)
        last[key] = (now, n)
    now += after_s
    for key in "abcd":
        if revision := renewals.overdue(key, now):
            assert revision == last[key][1]
            assert now - last[key][0] >= OVERDUE_S
            assert now - max(at for at, _ in last.values()) <= GAP_S


@pytest.mark.parametrize("after_s", [1.0, 5.0, 100.0])
def test_where_leases_end_by_themselves_nobody_is_overdue(after_s: float) -> None:
    renewals = Renewals(0.0)
    renewed(renewals, "w", "others", first_s=0.0, until_s=10.0)
    renewed(renewals, "others", first_s=11.0, until_s=10.0 + after_s)
    assert not renewals.overdue("w", 10.0 + after_s)


def test_a_process_is_there_until_it_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not process_gone(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_gone(child.pid), "it only waits to be reaped"
    child.communicate()
    assert process_gone(child.pid)


def test_what_is_not_known_is_not_gone() -> None:
    assert not process_gone(0)
    assert not process_gone(-1)
    assert not process_gone(-(2**22) - 1), "a group of processes that does not exist"
    assert not process_gone(1 << 70)
    assert not process_gone(1), "a process of another user"


def test_processes_that_see_each_other_are_on_the_same_machine() -> None:
    code = "from headrace.broker.membership.members import machine_id; print(machine_id())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == machine_id()


def test_the_name_of_a_process_is_not_its_state(tmp_path: Path) -> None:
    program = tmp_path / "a) Z x"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    child = subprocess.Popen([program, "60"])
    try:
        assert not process_gone(child.pid)
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("stat", [b"", b"1 (x)", OSError()])
def test_a_process_whose_state_cannot_be_read_is_not_gone(stat: bytes | OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_path: Path) -> bytes:
        if isinstance(stat, OSError):
            raise stat
        return stat

    monkeypatch.setattr(Path, "read_bytes", read)
    assert not process_gone(os.getpid())


def test_a_machine_is_known_by_its_boot_and_by_who_shares_its_process_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    boots = {"boot": "one\n"}
    monkeypatch.setattr(Path, "read_text", lambda _path, **_: boots["boot"])
    monkeypatch.setattr(os, "readlink", lambda _path: "pid:[1]")
    here = machine_id()
    boots["boot"] = "two\n"
    assert machine_id() != here
    boots["boot"] = "one\n"
    assert machine_id() == here
    monkeypatch.setattr(os, "readlink", lambda _path: "pid:[2]")
    assert machine_id() not in ("", here)


def test_a_machine_that_does_not_tell_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_path: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(os, "readlink", missing)
    assert machine_id() == ""
