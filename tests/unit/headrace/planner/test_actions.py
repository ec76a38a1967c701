from __future__ import annotations

from headrace.planner.actions import Action, actions_for
from tests.support.planner_sights import seen, worker


def test_a_role_change_comes_before_a_wake_and_a_wake_before_a_start() -> None:
    there = seen(
        0,
        worker("p1", "prefill", roles=("decode",), running=3),
        worker("p2", "prefill", roles=("decode",)),
        worker("d1", "decode"),
        worker("d2", "decode", state="asleep"),
    )
    assert actions_for(there, {"prefill": -1, "decode": 3}) == [
        Action(kind="role", role="decode", worker="p2"),
        Action(kind="wake", role="decode", worker="d2"),
        Action(kind="start", role="decode"),
    ]


def test_a_worker_that_cannot_take_the_role_is_drained_and_the_other_started() -> None:
    there = seen(0, worker("p1", "prefill"), worker("p2", "prefill"), worker("d1", "decode"))
    assert actions_for(there, {"prefill": -1, "decode": 1}) == [
        Action(kind="start", role="decode"),
        Action(kind="drain", role="prefill", worker="p1"),
    ]


def test_the_worker_with_the_least_work_is_drained() -> None:
    there = seen(0, worker("a", running=4), worker("b", running=1), worker("c", running=2))
    assert actions_for(there, {"aggregated": -2}) == [
        Action(kind="drain", role="aggregated", worker="b"),
        Action(kind="drain", role="aggregated", worker="c"),
    ]


def test_no_change_is_no_action() -> None:
    assert actions_for(seen(0, worker("a")), {"aggregated": 0}) == []
