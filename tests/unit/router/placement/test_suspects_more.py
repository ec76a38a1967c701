"""Suspects go to few trial workers, in groups; everything else goes elsewhere and waits for none of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.router.placement.pool import SLOW_START_S, WAIT_S
from headrace.router.placement.types import Placement
from tests.support.router.placement_pool import Pool, chain


def suspects(pool: Pool, names: str, limit: int, crashes: int = 2, **fields: object) -> None:
    for name in names:
        pool.offer(name, suspect=True, **fields)
        pool.scheduler.assess(name, limit=limit, crashes=crashes)


def test_a_request_that_may_be_suspect_waits_for_its_judge_and_then_goes_where_it_likes_or_to_a_trial_worker() -> None:
    pool = Pool("abc")
    pool.offer("one", suspect=True)
    pool.offer("two", suspect=True)
    assert pool.placed() == {}
    assert pool.scheduler.waiting == 2
    pool.scheduler.assess("one", limit=0, crashes=0)
    pool.scheduler.assess("two", limit=4, crashes=2)
    pool.scheduler.assess("unknown", limit=4, crashes=2)
    decisions = {one.request.id: one for one in pool.decide() if isinstance(one, Placement)}
    assert decisions["two"].reason == "trial"
    assert (decisions["one"].limit, decisions["two"].limit) == (0, 4)
    assert decisions["one"].worker != decisions["two"].worker, "nothing else is placed on the trial worker"


def test_a_group_goes_to_one_worker_in_three_and_the_rest_waits_without_blocking_others() -> None:
    pool = Pool("abc")
    suspects(pool, "stuvwxyz", 3)
    for n in range(6):
        pool.offer(f"r{n}")
    placed = pool.placed()
    (trial,) = {placed[name] for name in "stu"}
    assert not set("vwxyz") & set(placed)
    assert {placed[f"r{n}"] for n in range(6)} == set("abc") - {trial}


def test_when_the_worker_reports_that_a_group_is_cleared_the_next_one_follows_there() -> None:
    pool = Pool("abc")
    suspects(pool, "stuv", 2)
    trial = pool.placed()["s"]
    pool.event("started", "s", trial)
    pool.event("started", "t", trial)
    pool.report(trial, slots=0, running=2, suspects=2, limit=2)
    assert pool.placed() == {}
    pool.report(trial, slots=0, running=2, suspects=1, limit=2)
    assert pool.placed() == {"u": trial}
    pool.event("started", "u", trial)
    pool.report(trial, slots=8, running=3)
    pool.offer("r")
    assert pool.placed()["v"] == trial
    assert pool.placed() == {}


def test_between_two_groups_no_ordinary_request_comes_in() -> None:
    pool = Pool("abc")
    suspects(pool, "st", 1)
    trial = pool.placed()["s"]
    pool.event("started", "s", trial)
    pool.report(trial, slots=0, running=1, suspects=1, limit=1)
    for other in set("abc") - {trial}:
        pool.report(other, running=8)
    pool.offer("r")
    assert pool.placed() == {}
    pool.scheduler.cancel(["t"])
    pool.report(trial, slots=8, running=1)
    assert pool.placed() == {"r": trial}, "no suspect waits any more"


def test_the_most_suspect_goes_first_and_alone() -> None:
    pool = Pool("abc")
    suspects(pool, "a", 4)
    suspects(pool, "b", 1)
    suspects(pool, "c", 1, crashes=3)
    assert set(pool.placed()) == {"c"}


def test_the_worker_with_the_fewest_jobs_is_put_on_trial() -> None:
    pool = Pool("abc")
    for worker, running in zip("abc", (5, 1, 3), strict=True):
        pool.report(worker, running=running)
    suspects(pool, "s", 2)
    assert pool.placed() == {"s": "b"}


def test_a_trial_worker_of_another_router_takes_more_of_them() -> None:
    pool = Pool("abc")
    pool.report("c", slots=0, running=1, suspects=1, limit=2)
    suspects(pool, "st", 8)
    assert pool.placed() == {"s": "c"}


def test_a_full_a_draining_and_an_ineligible_worker_is_not_put_on_trial() -> None:
    pool = Pool("ab")
    pool.report("a", running=8)
    pool.join("b", draining=True)
    pool.join("c", labels=frozenset({"gpu"}))
    suspects(pool, "s", 2)
    assert pool.placed() == {"s": "c"}
    suspects(pool, "t", 2, require=frozenset({"tpu"}))
    assert pool.placed() == {}


def test_the_only_worker_of_a_pool_takes_others_beside_suspects_that_may_have_company() -> None:
    pool = Pool("a")
    suspects(pool, "stu", 2)
    pool.offer("r")
    assert pool.placed() == {"s": "a", "t": "a", "r": "a"}
    pool.join("b")
    pool.offer("q")
    assert pool.placed() == {"q": "b"}


def test_the_only_worker_of_a_pool_takes_others_and_a_suspect_that_is_to_run_alone_in_turn() -> None:
    pool = Pool("a")
    suspects(pool, "st", 1)
    pool.offer("r")
    assert pool.placed() == {"s": "a"}
    pool.report("a", slots=0, running=1, suspects=1, limit=1)
    pool.event("started", "s", "a")
    pool.report("a", slots=0, running=1, suspects=1, limit=1)
    assert pool.placed() == {}
    pool.report("a", slots=8, running=0)
    assert pool.placed() == {"t": "a"}


def test_the_only_worker_that_is_left_serves_ordinary_requests_while_lost_ones_are_due_back() -> None:
    pool = Pool("abc")
    pool.scheduler.remove_worker("a", pool.now)
    pool.scheduler.remove_worker("b", pool.now)
    suspects(pool, "st", 4)
    pool.offer("r")
    assert pool.placed() == {"r": "c"}
    pool.pass_time(1.0)
    pool.offer("r2")
    assert pool.placed() == {"r2": "c"}
    pool.join("d")
    assert pool.placed() == {"s": "d", "t": "d"}


def test_suspects_wait_for_lost_workers_no_longer_than_these_are_due() -> None:
    pool = Pool("ab")
    pool.scheduler.remove_worker("a", pool.now)
    suspects(pool, "s", 4)
    assert pool.placed() == {}
    assert pool.scheduler.next_wake_s(pool.now) is not None
    pool.pass_time(WAIT_S)
    assert pool.placed() == {"s": "b"}


def test_a_lost_worker_that_takes_long_to_start_is_not_waited_for() -> None:
    pool = Pool("ab")
    pool.join("a", start_s=SLOW_START_S + 1.0)
    pool.scheduler.remove_worker("a", pool.now)
    suspects(pool, "s", 4)
    assert pool.placed() == {"s": "b"}


def test_a_worker_that_came_in_place_of_the_lost_one_is_all_that_is_due_back() -> None:
    pool = Pool("a")
    pool.scheduler.remove_worker("a", pool.now)
    pool.join("b")
    suspects(pool, "s", 4)
    assert pool.placed() == {"s": "b"}


def test_a_worker_that_has_drained_is_not_waited_for() -> None:
    pool = Pool("ab")
    pool.join("a", draining=True)
    pool.scheduler.remove_worker("a", pool.now)
    suspects(pool, "s", 4)
    assert pool.placed() == {"s": "b"}


def test_a_trial_worker_that_is_left_alone_takes_no_further_suspects_and_then_ordinary_requests() -> None:
    pool = Pool("ab")
    suspects(pool, "st", 1)
    trial = pool.placed()["s"]
    pool.event("started", "s", trial)
    pool.report(trial, slots=0, running=1, suspects=1, limit=1)
    pool.scheduler.remove_worker("b" if trial == "a" else "a", pool.now)
    pool.report(trial, slots=8, running=1)
    pool.offer("r")
    assert pool.placed() == {"r": trial}


def test_a_worker_that_says_so_gets_nothing_until_it_has_ended() -> None:
    pool = Pool("a")
    pool.report("a", slots=0, running=1)
    pool.offer("r1")
    assert pool.placed() == {}
    pool.report("a")
    assert pool.placed() == {"r1": "a"}


def test_a_suspect_has_its_prompt_computed_where_it_runs() -> None:
    """The crash of a prefill worker would count for nothing."""
    pool = Pool("", prefill="always")
    pool.apart(decode="ab", prefill="p")
    for worker in "abp":
        pool.report(worker)
    suspects(pool, "s", 2)
    placement = pool.placement()
    assert placement.prefill is not None
    assert (placement.prefill.remote, placement.prefill.reason) == (False, "trial")


@pytest.mark.parametrize("others", [0, 60], ids=["few", "many"])
def test_nothing_is_held_back_for_the_worker_that_has_its_prefix_and_is_on_trial(others: int) -> None:
    """Whether the choice is made one by one or with arrays."""
    pool = Pool()
    prefix = chain(1, 60)
    pool.holds("a", prefix)
    pool.report("a", slots=0, running=1)
    pool.report("b", running=0)
    names = [f"r{n}" for n in range(1 + others)]
    for name in names:
        pool.offer(name, prefix)
    assert pool.placed()["r0"] == "b"


def test_nothing_is_held_back_for_a_decode_worker_that_is_on_trial() -> None:
    pool = Pool("")
    pool.apart(decode="ab", prefill="p")
    prefix = chain(1, 60)
    pool.holds("a", prefix[:50])
    pool.report("a", slots=0, running=1)
    pool.report("b")
    pool.report("p")
    pool.offer("r0", prefix)
    assert pool.placed() == {"r0": "b"}


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), max_size=20),
    st.integers(0, 12),
)
def test_never_more_workers_or_larger_groups_than_the_rule_allows(
    workers: int, asked: list[tuple[int, int]], ordinary: int
) -> None:
    """`asked`: limit (0 = cleared meanwhile) and crashes of each suspect."""
    names = "abcdefghi"[:workers]
    pool = Pool(names)
    limits = {f"s{n}": limit for n, (limit, _) in enumerate(asked)}
    for n, (limit, crashes) in enumerate(asked):
        pool.offer(f"s{n}", suspect=True)
        pool.scheduler.assess(f"s{n}", limit=limit, crashes=crashes)
    for n in range(ordinary):
        pool.offer(f"r{n}")
    groups: dict[str, list[str]] = {}
    for request, worker in pool.placed().items():
        groups.setdefault(worker, []).append(request)
    trial = {worker for worker, placed in groups.items() if any(limits.get(name, 0) for name in placed)}
    assert len(trial) <= max(1, workers // 3)
    for worker in trial:
        tried = [limits[name] for name in groups[worker] if limits.get(name, 0)]
        assert len(tried) <= min(tried)
        if workers > 1 or min(tried) == 1:
            assert len(tried) == len(groups[worker]), "nothing ordinary is placed there"
    assert bool(trial) == any(limits.values())
