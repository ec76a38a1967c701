from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.planner.observe import WorkerSight
from headrace.planner.plan import ROOM, Action, Plan, actions_for, most_leaving, victims, within_budget
from tests.support.planner_sights import seen, worker


def leaving(*workers: WorkerSight, leave: int = 1, waiting: int = 0) -> int:
    return most_leaving(workers, leave, waiting=waiting, sequences=100)


def test_none_leaves_whose_work_does_not_fit_on_the_rest() -> None:
    assert leaving(worker("a", running=28), worker("b", running=28)) == 0
    assert leaving(worker("a", running=10), worker("b", running=10)) == 1
    assert leaving(worker("a", running=1, kv_used=0.6), worker("b", running=1, kv_used=0.6)) == 0, "nor its KV blocks"
    assert leaving(worker("a"), worker("b")) == 1
    assert leaving(worker("a"), worker("b"), waiting=40) == 0
    assert leaving(worker("a"), worker("b", report_age_s=None)) == 0, "an unknown load is not zero"


def test_the_last_one_leaves_only_with_empty_hands() -> None:
    assert leaving(worker("a", running=1)) == leaving(worker("a"), waiting=1) == 0
    assert leaving(worker("a")) == 1


def test_victims_hold_the_least_work() -> None:
    some = [worker("a", running=5), worker("b", running=1, waiting=1), worker("c", running=2, kv_used=0.5)]
    assert [one.worker for one in victims(some, 2)] == ["b", "c"]


@given(st.lists(st.integers(0, 32), min_size=1, max_size=12), st.integers(0, 12), st.integers(0, 60), st.integers(1, 64))
def test_whatever_leaves_the_rest_has_room(running: list[int], leave: int, waiting: int, sequences: int) -> None:
    workers = [worker(f"w{i}", running=n) for i, n in enumerate(running)]
    gone = most_leaving(workers, leave, waiting=waiting, sequences=sequences)
    rest = len(workers) - gone
    assert 0 <= gone <= leave
    if gone:
        assert sum(running) + waiting <= ROOM * rest * min(32, sequences)


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


def plan(pool: str, *, starts: int, supply: int = 0, price: float = 0.0, drains: int = 0) -> Plan:
    return Plan(
        at=0.0,
        model=f"model-{pool}",
        pool=pool,
        reason="forecast",
        desired={"decode": supply + starts - drains},
        supply={"decode": supply},
        actions=(
            *[Action(kind="start", role="decode")] * starts,
            *[Action(kind="drain", role="decode", worker=f"w{n}") for n in range(drains)],
        ),
        price=price,
    )


def starts(plans: list[Plan]) -> list[int]:
    return [sum(one.kind == "start" for one in plan.actions) for plan in plans]


def test_without_a_budget_every_plan_is_kept() -> None:
    plans = [plan("a", starts=100), plan("b", starts=3)]
    assert within_budget(plans, {}, 0.0) == plans


def test_when_it_binds_the_first_pool_has_what_is_left_and_the_reason_says_so() -> None:
    plans = [plan("a", starts=3, supply=2), plan("b", starts=4, supply=1)]
    found = within_budget(plans, {"a": 2, "b": 1}, 8.0, ["model-b"])
    assert starts(found) == [1, 4]
    assert [one.reason for one in found] == ["over_budget", "forecast"]
    assert [one.desired["decode"] for one in found] == [3, 5]


def test_pools_of_one_rank_take_turns() -> None:
    found = within_budget([plan("a", starts=9), plan("b", starts=9)], {}, 5.0)
    assert starts(found) == [3, 2]


def test_prices_count_and_a_dear_pool_does_not_stop_a_cheap_one() -> None:
    plans = [plan("dear", starts=2, price=8.0), plan("cheap", starts=5, price=1.0)]
    assert starts(within_budget(plans, {}, 12.0, ["dear", "cheap"])) == [1, 4]


def test_workers_that_drain_or_sleep_are_not_free_yet() -> None:
    plans = [plan("a", starts=0, supply=4, drains=2), plan("b", starts=2)]
    assert starts(within_budget(plans, {"a": 4}, 4.0)) == [0, 0]
    assert starts(within_budget(plans, {"a": 2}, 4.0)) == [0, 2]


def test_nothing_is_drained_for_the_budget_alone() -> None:
    plans = [plan("a", starts=1, supply=6), plan("b", starts=0, supply=6)]
    found = within_budget(plans, {"a": 6, "b": 6}, 4.0, ["a"])
    assert [one.actions for one in found] == [(), ()]
    assert [one.desired["decode"] for one in found] == [6, 6]


pools = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from([0.0, 0.5, 1.0, 4.0])), min_size=1, max_size=5)


@given(pools, st.floats(0.5, 60.0))
def test_starts_never_go_beyond_the_budget_and_none_that_fits_is_refused(
    told: list[tuple[int, int, float]], most: float
) -> None:
    plans = [plan(f"p{n}", starts=asked, supply=there, price=price) for n, (asked, there, price) in enumerate(told)]
    held = {f"p{n}": there for n, (_, there, _) in enumerate(told)}
    found = within_budget(plans, held, most)
    prices = [price or 1.0 for _, _, price in told]
    there = sum(price * count for price, count in zip(prices, held.values(), strict=True))
    cost = there + sum(price * count for price, count in zip(prices, starts(found), strict=True))
    assert cost <= max(most, there) + 1e-6
    for before, after, price in zip(plans, found, prices, strict=True):
        if starts([after]) < starts([before]):
            assert cost + price > most - 1e-6
            assert after.reason == "over_budget"
