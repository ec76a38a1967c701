"""The prefill queue as the router knows it: who counts in it, and what its depth decides."""

from __future__ import annotations

import pytest

from headrace.broker.codec import pack_u64
from headrace.router.placement.disagg_planner import announced
from headrace.router.placement.types import Placement
from tests.support.router.disagg_pool import LONG, apart, elsewhere, where
from tests.support.router.placement_pool import chain


def test_a_deep_prefill_queue_makes_a_decode_worker_compute_it_and_that_is_the_reason() -> None:
    pool = apart()
    elsewhere(pool, "x", 200_000)
    pool.report("a", running=1)
    pool.offer("r", chain(2, 2))
    assert where(pool.placement()) == (False, "queue")


@pytest.mark.parametrize("kind", ["prefilled", "settled", "moved"])
def test_a_prompt_that_is_computed_or_given_up_is_in_the_queue_no_more(kind: str) -> None:
    pool = apart()
    elsewhere(pool, "x", 200_000)
    assert pool.scheduler.pool.disagg.pool.queued_tokens(pool.now) == pytest.approx(200_000, rel=0.01)
    pool.event(kind, "x", "a")
    assert pool.scheduler.pool.disagg.pool.queued_tokens(pool.now) == 0
    pool.offer("r", LONG)
    assert where(pool.placement()) == (True, "pays")


def test_own_placements_make_the_queue_deeper_and_failed_ones_do_not() -> None:
    pool = apart()
    pool.offer("r", LONG)
    placement = pool.placement()
    queue = pool.scheduler.pool.disagg.pool
    assert queue.queued_tokens(pool.now) == pytest.approx(8192, rel=0.01)
    pool.scheduler.unplace(placement, pool.now)
    assert queue.queued_tokens(pool.now) == 0


def test_jobs_that_nobody_ever_reports_are_forgotten() -> None:
    pool = apart(entry_expiry_s=1.0)
    elsewhere(pool, "x", 24_000)
    pool.pass_time(4)
    pool.decide()
    assert pool.scheduler.pool.disagg.pool.jobs == {}


def test_while_everybody_is_full_requests_wait_in_the_window() -> None:
    pool = apart("a", "p")
    pool.report("a", running=4, queued_prefill_tokens=8192)
    elsewhere(pool, "x", 24_000)
    for n in range(3):
        pool.offer(f"r{n}", chain(n + 1, 16))
    assert pool.decide() == []
    wake_s = pool.scheduler.next_wake_s(pool.now)
    assert wake_s is not None
    assert wake_s > pool.now
    pool.pass_time(0.95)
    pool.report("a", running=4, queued_prefill_tokens=8192)
    assert [where(one) for one in pool.decide() if isinstance(one, Placement)] == [(True, "pays")], "one at a time"


def test_shorter_prompts_in_the_window_count_as_queue_while_no_prefill_worker_has_room() -> None:
    """Alone it would wait for the prefill worker; behind others it is sooner done where it is answered."""
    placed = []
    for others in (0, 6):
        pool = apart("ab", "p", congestion=0.0, prefill_disturbance=0.2, prefill_late=0.0)
        pool.report("b", running=8)  # full
        pool.report("a", running=3)
        elsewhere(pool, "x", 2600)
        pool.offer("r", chain(99, 16))
        for n in range(others):
            pool.offer(f"r{n}", chain(n + 1, 15), worker="b")
        placed.append("r" in pool.placed())
    assert placed == [False, True]


def test_a_worker_that_computes_a_prompt_may_get_one_whose_prompt_is_computed_elsewhere() -> None:
    pool = apart()
    pool.report("a", running=4, queued_prefill_tokens=50_000)
    pool.offer("r", LONG)
    placement = pool.placement()
    assert placement.remote
    load = pool.scheduler.pool.loads.ordered[0]
    assert load.pending_tokens(pool.now) == 50_000, "nothing of it is computed there"
    assert load.running == 5


def test_slots_count_all_the_same() -> None:
    pool = apart("ab")
    pool.report("a", running=8)
    pool.offer("r", LONG, worker="a")
    assert pool.decide() == []


def test_a_decision_is_made_as_soon_as_a_prefill_worker_has_room() -> None:
    pool = apart()
    pool.report("a", running=4, queued_prefill_tokens=8192)
    elsewhere(pool, "x", 2640)  # 0.118 s, with its step
    pool.offer("r", LONG)
    assert pool.decide() == []
    assert pool.scheduler.next_wake_s(pool.now) == pytest.approx(pool.now + 0.018, abs=1e-3)


def test_what_a_prefill_worker_reports_is_in_the_queue_too() -> None:
    pool = apart()
    pool.report("p", running=3, queued_prefill_tokens=200_000)
    pool.offer("r", chain(2, 2))
    assert where(pool.placement()) == (False, "queue")


def test_a_prefix_that_appears_while_a_request_waits_counts() -> None:
    pool = apart("a", "pqs")
    for n, worker in enumerate("pqs"):
        elsewhere(pool, f"x{n}", 6000, prefill=worker)
    pool.report("a", running=4, queued_prefill_tokens=8192)
    pool.offer("r", [*LONG, *chain(2, 4)])
    assert pool.decide() == []
    pool.holds("q", LONG)
    for n in range(3):
        pool.event("prefilled", f"x{n}", "a")
    assert announced(pool.placement()) == "q"


def test_blocks_that_will_be_needed_when_the_prompt_comes_are_not_given_to_others() -> None:
    pool = apart(prefill_lookahead_s=100.0)
    pool.report("a", running=1, blocks_total=40, blocks_used=0)
    pool.offer("r1", LONG)
    assert pool.placement().remote
    pool.event("started", "r1", "a")
    pool.report("a", running=2, blocks_total=40, blocks_used=0)  # its engine has not seen it yet
    elsewhere_done = chain(5, 30)
    pool.offer("r2", elsewhere_done)
    assert pool.decide() == []
    pool.event("prefilled", "r1", "a")
    pool.report("a", running=1, blocks_total=40, blocks_used=0)
    assert pool.placement().request.id == "r2"


def test_what_other_routers_send_away_is_no_prefill_of_the_decode_worker() -> None:
    pool = apart()
    pool.event("placed", "x", "a", tokens=8192, uncached=8192, blocks=16, by="r2", hashes=pack_u64(chain(9, 16)), prefill="*")
    load = pool.scheduler.pool.loads.ordered[0]
    assert (load.pending_tokens(pool.now), load.running) == (0, 5)


def test_how_long_to_wait_for_the_queue_grows_with_it_and_is_bounded() -> None:
    waits = []
    for tokens in (0, 2000, 24_000, 10_000_000):
        pool = apart(prefill="always", prefill_lookahead_s=1e6, prefill_wait_s=5.0)
        if tokens:
            elsewhere(pool, "x", tokens)
        pool.offer("r", LONG)
        decision = pool.placement().prefill
        assert decision is not None
        waits.append(decision.wait_s)
    assert waits == sorted(waits)
    assert 0 < waits[0] < waits[2]
    assert waits[-1] == 5.0


@pytest.mark.parametrize(("bearable_s", "queued", "stays"), [(1.5, 12_000, False), (1.5, 48_000, True), (0.0, 12_000, True)])
def test_a_long_step_is_no_way_out_while_the_way_elsewhere_is_bearable(bearable_s: float, queued: int, stays: bool) -> None:
    """Without that, one sequence beside it weighs little against a wait for the prefill worker."""
    pool = apart(prefill_bearable_s=bearable_s, prefill_late=0.0)
    pool.report("a", running=1)
    elsewhere(pool, "before", queued)
    pool.offer("r", LONG)
    placed = [one for one in pool.decide() if isinstance(one, Placement)]
    assert [where(one) for one in placed] == ([(False, "queue")] if stays else [])


def test_with_nobody_beside_it_a_long_step_hurts_nobody() -> None:
    pool = apart(prefill_late=0.0)
    pool.report("a", running=0)
    elsewhere(pool, "before", 12_000)
    pool.offer("r", LONG)
    assert where(pool.placement()) == (False, "cheaper")


def test_the_queue_is_given_time_even_where_no_wait_is_predicted() -> None:
    """A decode worker that loses patience computes the prompt beside all that it decodes."""
    pool = apart()
    pool.offer("r", LONG)
    placement = pool.placement()
    assert where(placement) == (True, "pays")
    assert placement.prefill is not None
    assert placement.prefill.wait_s == 2.0
