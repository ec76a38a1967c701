"""Hand-over times, learnt from what decode workers report."""

from __future__ import annotations

import random
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.codec import pack_u64
from headrace.broker.messages.events import LoadReport
from headrace.router.placement.calibration import SpeedEstimate
from headrace.router.placement.disagg_planner import announced
from headrace.router.placement.transfer import IN_TRANSIT_S, MOST_S, PrefillPool, TransferTimes
from headrace.router.placement.types import WorkerInfo
from tests.support.router.disagg_pool import LONG, apart, elsewhere, where
from tests.support.router.placement_pool import BLOCK, Pool, chain


def report(took_s: float, tokens: int, worker: str = "d") -> LoadReport:
    return LoadReport(
        worker=worker, epoch=1, n=1, at=0.0, slots=1, running=0, waiting=0, handover_s=took_s, handover_tokens=tokens
    )


def made() -> TransferTimes:
    return TransferTimes(fixed_s=0.03, per_token_s=5e-6)


def test_before_anything_is_reported_the_prior_counts() -> None:
    assert made().seconds(10_000) == pytest.approx(0.08)


@pytest.mark.parametrize(("fixed_s", "per_token_s"), [(0.02, 3e-6), (0.3, 1e-4), (0.001, 2e-7), (0.05, 1e-9)])
def test_what_is_reported_is_learnt(fixed_s: float, per_token_s: float) -> None:
    times, rng = made(), random.Random(1)
    for _ in range(200):
        tokens = rng.randrange(100, 30_000)
        times.observe(report((fixed_s + tokens * per_token_s) * rng.uniform(0.9, 1.1), tokens))
    for tokens in (500, 5000, 25_000):
        assert times.seconds(tokens) == pytest.approx(fixed_s + tokens * per_token_s, rel=0.15)


def test_a_line_that_became_slower_is_noticed() -> None:
    times, rng = made(), random.Random(2)
    for n in range(350):
        tokens = rng.randrange(500, 30_000)
        slow = 1.0 if n < 200 else 5.0
        times.observe(report(0.02 + tokens * 4e-6 * slow, tokens))
    assert times.seconds(8000) == pytest.approx(0.02 + 8000 * 2e-5, rel=0.2)


def test_single_hand_overs_that_were_held_up_change_little() -> None:
    times = made()
    for n in range(100):
        times.observe(report(0.03 + n * 1e-5 + (2.0 if n % 20 == 19 else 0.0), 1000 + n))
    assert times.seconds(1000) < 0.06


def test_a_hand_over_counts_once_however_often_it_is_reported() -> None:
    times = made()
    assert times.observe(report(0.5, 1000))
    assert not times.observe(report(0.5, 1000))
    assert times.observe(report(0.5, 1000, worker="e"))
    times.remove("d")
    assert times.observe(report(0.5, 1000))
    assert times.samples == 3


@settings(deadline=None)
@given(samples=st.lists(st.tuples(st.floats(allow_nan=True), st.integers(-10, 10**12)), max_size=30))
def test_nothing_that_is_reported_makes_it_useless(samples: list[tuple[float, int]]) -> None:
    times = made()
    for took_s, tokens in [*samples, (nan, 1), (inf, 1), (-1.0, 1), (2 * MOST_S, 1), (1.0, -1)]:
        times.observe(report(took_s, tokens))
        assert 0 < times.seconds(0) < inf
        assert times.seconds(0) <= times.seconds(1000) < inf


SPEED = SpeedEstimate(0.0, 1000.0, 0.0)


def prefill_pool_made(workers: str = "p", *, grace_s: float = 5.0, **info: Any) -> PrefillPool:
    pool = PrefillPool(grace_s)
    for worker in workers:
        pool.put(WorkerInfo(worker=worker, slots=8, role="prefill", handover="x", **info), SPEED)
    return pool


def place(pool: PrefillPool, job: str, tokens: float, now_s: float = 0.0, **more: Any) -> None:
    pool.place(job, **{"decode": "d", "handover": "x", "tokens": tokens, "blocks": 2, "now_s": now_s, **more})


def waits(pool: PrefillPool, now_s: float) -> dict[str, float]:
    return {one.info.worker: round(one.wait_s(now_s), 6) for one in pool}


def prefill_pool_report(worker: str = "p", **fields: Any) -> LoadReport:
    values: dict[str, Any] = {"slots": 8, "running": 0, "waiting": 0, **fields}
    return LoadReport(worker=worker, epoch=1, n=1, at=0.0, **values)


def test_jobs_for_any_go_to_whoever_is_through_first() -> None:
    pool = prefill_pool_made("pq")
    for n, tokens in enumerate((3000, 1000, 1000)):
        place(pool, f"j{n}", tokens)
    assert waits(pool, 0.0) == {"p": 3.0, "q": 2.0}
    assert waits(pool, 2.5) == {"p": 0.5, "q": 0.0}
    assert pool.queued_tokens(0.0) == 5000
    assert pool.queued_tokens(1.5) == pytest.approx(2000)


def test_a_job_for_one_waits_for_that_one() -> None:
    pool = prefill_pool_made("pq")
    place(pool, "a", 1000)
    place(pool, "b", 1000, worker="p")
    assert waits(pool, 0.0) == {"p": 2.0, "q": 0.0}


def test_jobs_for_others_that_hand_over_differently_keep_nobody_busy() -> None:
    pool = prefill_pool_made("p")
    place(pool, "a", 1000, handover="y")
    assert waits(pool, 0.0) == {"p": 0.0}
    assert pool.close("a", 0.0) is not None


def test_what_is_done_early_moves_up_those_behind_it_and_only_those() -> None:
    pool = prefill_pool_made()
    for n in range(3):
        place(pool, f"j{n}", 1000)
    pool.close("j1", 0.5)  # cancelled
    assert waits(pool, 0.5) == {"p": 1.5}
    assert [round(job.done_s, 6) for job in pool.jobs.values()] == [1.0, 2.0]
    pool.close("j0", 0.75)
    assert waits(pool, 0.75) == {"p": 1.0}
    pool.close("j2", 3.0)  # late: nothing to move
    assert waits(pool, 3.0) == {"p": 0.0}


def test_a_report_that_says_more_is_believed_and_so_is_one_of_having_nothing_to_do() -> None:
    pool = prefill_pool_made()
    pool.on_report(prefill_pool_report(running=1, queued_prefill_tokens=4000), SPEED, 0.0)
    assert waits(pool, 0.0) == {"p": 4.0}
    pool.on_report(prefill_pool_report(running=1, queued_prefill_tokens=500), SPEED, 0.1)
    assert waits(pool, 0.1) == {"p": 3.9}, "more may lie in the queue than in the engine"
    pool.on_report(prefill_pool_report(), SPEED, 0.2)
    assert waits(pool, 0.2) == {"p": 0.0}


def test_what_was_placed_just_now_is_not_forgotten_because_the_worker_has_not_seen_it() -> None:
    pool = prefill_pool_made()
    place(pool, "a", 1000)
    pool.on_report(prefill_pool_report(), SPEED, IN_TRANSIT_S / 2)
    assert waits(pool, IN_TRANSIT_S / 2)["p"] == pytest.approx(1.0 - IN_TRANSIT_S / 2)
    pool.on_report(prefill_pool_report(), SPEED, IN_TRANSIT_S * 2)
    assert waits(pool, IN_TRANSIT_S * 2) == {"p": 0.0}


def test_jobs_of_a_worker_that_leaves_are_counted_at_those_that_stay() -> None:
    pool = prefill_pool_made("pq")
    place(pool, "a", 1000, worker="p")
    place(pool, "b", 1000)
    assert pool.remove("p", 0.0) is not None
    assert waits(pool, 0.0) == {"q": 2.0}
    assert pool.remove("q", 0.0) is not None
    assert set(pool.jobs) == {"a", "b"}
    pool.expire(60.0)
    assert pool.jobs == {}


def test_blocks_are_awaited_until_the_prompt_is_there() -> None:
    pool = prefill_pool_made()
    place(pool, "a", 1000, blocks=5)
    place(pool, "b", 1000, blocks=0)
    place(pool, "c", 1000, blocks=7, decode="e")
    assert (pool.awaited_blocks("d"), pool.awaited_blocks("e"), pool.awaited_blocks("f")) == (5, 7, 0)
    pool.close("a", 1.0)
    pool.close("b", 1.0)
    assert pool.awaited_blocks("d") == 0


def test_a_job_is_given_as_much_time_again_before_it_is_forgotten() -> None:
    pool = prefill_pool_made(grace_s=5.0)
    place(pool, "a", 10_000)
    pool.expire(24.9)
    assert set(pool.jobs) == {"a"}
    pool.expire(25.1)
    assert pool.jobs == {}


def test_steps_cost_time_beside_their_tokens() -> None:
    pool = prefill_pool_made(step_tokens=1000)
    pool.ordered[0].speed = SpeedEstimate(0.1, 1000.0, 0.0)
    place(pool, "a", 2500)
    assert waits(pool, 0.0) == {"p": 2.75}


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["place", "close", "report", "leave", "join", "pass"]), st.integers(0, 5), st.integers(0, 5000)),
    max_size=60,
)


@settings(deadline=None)
@given(actions=ACTIONS)
def test_whatever_happens_the_books_balance_and_time_frees_everybody(actions: list[tuple[str, int, int]]) -> None:
    pool = prefill_pool_made("pq")
    now_s = 0.0
    for what, n, amount in actions:
        name = "pq"[n % 2]
        if what == "place":
            place(pool, f"j{n}", amount, now_s, blocks=n, worker=name if n % 3 == 0 and pool.get(name) else "")
        elif what == "close":
            pool.close(f"j{n}", now_s)
        elif what == "report" and pool.get(name) is not None:
            pool.on_report(prefill_pool_report(name, running=n % 2, queued_prefill_tokens=amount if n % 2 else 0), SPEED, now_s)
        elif what == "leave":
            pool.remove(name, now_s)
        elif what == "join":
            pool.put(WorkerInfo(worker=name, slots=8, role="prefill", handover="x"), SPEED)
        else:
            now_s += amount / 1000
        assert pool.awaited_blocks("d") == sum(job.blocks for job in pool.jobs.values())
        assert 0 <= pool.queued_tokens(now_s) <= sum(job.tokens for job in pool.jobs.values()) + 1e-6
        assert [one.column for one in pool] == list(range(len(pool)))
        for one in pool:
            assert set(one.jobs) <= set(pool.jobs)
    assert all(one.wait_s(now_s + 1e4) == 0 for one in pool)
    pool.expire(now_s + 1e6)
    assert pool.jobs == {}


def test_a_long_prompt_beside_running_sequences_is_computed_elsewhere_and_a_short_one_is_not() -> None:
    pool = apart()
    pool.offer("long", LONG)
    placement = pool.placement()
    assert where(placement) == (True, "pays")
    assert announced(placement) == "*"
    pool.offer("short", tokens=100)
    assert where(pool.placement()) == (False, "short")


def test_what_the_decode_worker_has_cached_need_not_go_anywhere() -> None:
    pool = apart()
    pool.holds("a", LONG)
    pool.offer("r", [*LONG, 7], tokens=len(LONG) * BLOCK + 100)
    placement = pool.placement()
    assert where(placement) == (False, "cached")
    assert placement.uncached == 100


def test_never_and_always_ask_nobody_what_it_costs() -> None:
    pool = apart(prefill="never")
    pool.offer("r", LONG)
    assert where(pool.placement()) == (False, "never")
    pool = apart(prefill="always")
    pool.offer("r", tokens=1)
    assert where(pool.placement()) == (True, "always")


def test_a_slow_way_there_makes_it_not_worth_going() -> None:
    pool = apart(prefill_disturbance=0.0, prefill_late=0.0, lookahead=1.0)
    assert _goes_away(pool, 1)
    for n in range(40):
        pool.report("a", running=4, handover_s=3.0 + n / 1000, handover_tokens=8192)
    assert not _goes_away(pool, 2)


def _goes_away(pool: Pool, number: int) -> bool:
    """Whether a long prompt does, when it would have to wait a little where it is answered."""
    pool.report("a", running=4, queued_prefill_tokens=3000)
    pool.offer(f"r{number}", chain(number, 16))
    placement = pool.placement()
    pool.event("prefilled", placement.request.id, placement.worker)
    pool.pass_time(10.0)
    return placement.remote


def test_the_more_sequences_would_be_kept_waiting_the_rather_it_goes_away() -> None:
    for running, remote in ((0, False), (6, True)):
        pool = apart(prefill_late=0.0)
        pool.report("a", running=running)
        elsewhere(pool, "x", 2000)  # 83 ms before it
        pool.offer("r", LONG)
        assert pool.placement().remote is remote, running


def test_steps_beyond_the_wanted_time_between_tokens_count_more() -> None:
    for itl_s, remote in ((10.0, False), (0.02, True)):
        pool = apart(prefill_itl_s=itl_s, prefill_disturbance=0.0)
        elsewhere(pool, "x", 2000)
        pool.offer("r", chain(3, 4))
        assert pool.placement().remote is remote, itl_s


def test_a_prefix_that_a_prefill_worker_has_is_worth_naming_it() -> None:
    pool = apart("a", "pqs")
    pool.holds("q", LONG)
    pool.offer("r", [*LONG, *chain(2, 4)])
    placement = pool.placement()
    assert placement.prefill is not None
    assert (placement.prefill.worker, placement.prefill.reason) == ("q", "prefix_there")
    assert announced(placement) == "q"


def test_a_prefix_is_not_worth_waiting_longer_for_than_computing_takes() -> None:
    pool = apart("a", "pqs")
    pool.holds("q", LONG)
    elsewhere(pool, "x", 100_000, prefill="q")
    pool.offer("r", [*LONG, *chain(2, 4)])
    placement = pool.placement()
    assert placement.prefill is not None
    assert (placement.prefill.worker, placement.prefill.reason) == ("", "pays")


def test_a_prefix_is_worth_waiting_for_a_little() -> None:
    pool = apart("a", "pqs")
    pool.holds("q", LONG)
    elsewhere(pool, "x", 4800, prefill="q")  # 0.2 s; without it 0.43 s
    pool.offer("r", [*LONG, *chain(2, 4)])
    assert pool.decide() == []
    pool.pass_time(0.15)
    assert pool.placement().prefill is not None


def test_blocks_that_are_computed_elsewhere_are_not_cached_before_they_are_there() -> None:
    pool = apart()
    pool.offer("r1", LONG)
    assert pool.placement().remote
    pool.event("prefilled", "r1", "a")
    pool.offer("r2", LONG)
    placement = pool.placement()
    assert (placement.remote, placement.uncached) == (True, len(LONG) * BLOCK)
    pool.event("prefilled", "r2", "a")
    pool.holds("a", LONG)
    pool.offer("r3", LONG)
    assert where(pool.placement()) == (False, "cached")


@pytest.mark.parametrize("by", ["own", "other"])
def test_siblings_follow_each_other_to_the_prefill_worker_that_computes_their_prefix(by: str) -> None:
    pool = apart("a", "pqs", prefill_lookahead_s=100.0)
    if by == "own":
        pool.holds("q", LONG[:8])
        pool.offer("r1", LONG)
        assert announced(pool.placement()) == "q"
    else:
        hashes = pack_u64(LONG)
        pool.event("placed", "x", "a", tokens=8192, uncached=8192, blocks=16, by="r2", hashes=hashes, prefill="q")
    pool.offer("r2", [*LONG, *chain(2, 30)])
    assert pool.placement().remote
    assert pool.view.verify("q", LONG).device == len(LONG)
    assert pool.view.verify("a", LONG).device == 0


def test_a_decode_worker_without_cache_events_is_taken_to_hold_what_was_placed_on_it() -> None:
    pool = Pool("")
    pool.apart(decode="a", kv_events=False)
    pool.apart(prefill="p")
    pool.report("a", running=4)
    pool.offer("r1", LONG)
    assert pool.placement().remote
    pool.offer("r2", LONG)
    assert where(pool.placement()) == (False, "cached")


def test_prompts_that_wait_for_the_same_step_count_together() -> None:
    """Each alone would fit into a step that is short enough."""
    remote = []
    for before in (0, 400):
        pool = apart(prefill_itl_s=0.04, lookahead=0.5)
        elsewhere(pool, "x", 2300)
        pool.report("a", running=4, queued_prefill_tokens=before)
        pool.pass_time(0.02)  # the step that runs may have begun before them
        pool.offer("r", tokens=500)
        remote.append(pool.placement().remote)
    assert remote == [False, True]
