"""Which sleeping worker is woken for what waits."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.messages.members import WorkerMember
from headrace.router.session.intake import worker_to_wake


class Wants(NamedTuple):
    adapter: str = ""
    worker: str = ""
    require: list[str] = []


def asleep(name: str, level: int = 1, **fields: object) -> WorkerMember:
    return WorkerMember(worker=name, pool="p", model="m", draining=True, sleeping=level, **fields)  # type: ignore[arg-type]


def awake(name: str, **fields: object) -> WorkerMember:
    return WorkerMember(worker=name, pool="p", model="m", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("waiting", "members", "chosen"),
    [
        ([], [asleep("a")], None),
        ([Wants()], [asleep("b"), asleep("a")], "a"),
        ([Wants()], [asleep("a", 2), asleep("b", 1)], "b"),
        ([Wants()], [asleep("a"), awake("b")], None),
        ([Wants()], [asleep("a"), awake("b", role="prefill")], "a"),
        ([Wants()], [asleep("a", role="prefill")], None),
        ([Wants()], [asleep("a"), awake("b", draining=True)], "a"),
        ([Wants()], [asleep("a"), asleep("b", waking=True)], None),
        ([Wants()], [awake("a", draining=True, paused=True)], None),
        ([Wants(adapter="x")], [asleep("a"), asleep("b", adapters=["x"]), awake("c")], "b"),
        ([Wants(require=["fast"])], [asleep("a"), asleep("b", labels=["fast", "new"]), awake("c", labels=["new"])], "b"),
        ([Wants(worker="b")], [asleep("a"), asleep("b"), awake("c")], "b"),
        ([Wants(), Wants(adapter="x")], [asleep("b", adapters=["x"]), awake("c")], "b"),
        ([Wants(adapter="y")], [asleep("a", adapters=["x"])], None),
    ],
)
def test_the_lightest_sleeper_that_may_take_what_no_other_may(
    waiting: list[Wants], members: list[WorkerMember], chosen: str | None
) -> None:
    assert worker_to_wake(waiting, members) == chosen


def test_one_that_was_asked_counts_as_up_and_one_that_failed_is_left_alone() -> None:
    members = [asleep("a"), asleep("b")]
    assert worker_to_wake([Wants()], members, asked=["a"]) is None
    assert worker_to_wake([Wants()], members, resting=["a"]) == "b"
    assert worker_to_wake([Wants()], members, resting=["a", "b"]) is None


def any_member(name: str, level: int, waking: bool, draining: bool, adapters: list[str]) -> WorkerMember:
    stands: dict[str, object] = {"sleeping": level, "waking": waking and level > 0, "draining": draining or level > 0}
    return awake(name, adapters=adapters, **stands)


MEMBER = st.builds(
    any_member,
    st.sampled_from("abcdef"),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from("xy"), unique=True),
)
WANTS = st.builds(Wants, adapter=st.sampled_from(["", "x", "y"]), worker=st.sampled_from(["", "a", "b"]), require=st.just([]))


@given(st.lists(WANTS, max_size=5), st.lists(MEMBER, max_size=6, unique_by=lambda member: member.worker))
def test_who_is_woken_sleeps_and_serves_a_request_that_nobody_else_takes(
    waiting: list[Wants], members: list[WorkerMember]
) -> None:
    def may(wants: Wants, member: WorkerMember) -> bool:
        return wants.worker in ("", member.worker) and (not wants.adapter or wants.adapter in member.adapters)

    chosen = worker_to_wake(waiting, members)
    left = [w for w in waiting if not any(may(w, m) for m in members if m.waking or not m.draining)]
    sleepers = {m.worker: m for m in members if m.sleeping and not m.waking}
    if chosen is None:
        assert not any(may(w, m) for w in left for m in sleepers.values())
    else:
        assert any(may(w, sleepers[chosen]) for w in left)
