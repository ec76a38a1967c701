"""Where prompts are computed: when the way to a prefill worker pays, what it does to placement, and what is said about it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.codec import pack_u64
from broker.messages import PrefillDecision
from router.errors import SettingsInvalid
from router.placement.disaggregation import announced
from router.placement.settings import SchedulerSettings
from router.placement.types import Placement, Shed
from tests.unit.router.placement.pool import BLOCK, Pool, chain

LONG = chain(1, 16)  # 8,192 tokens: 0.34 s of prefill
REASONS = {
    True: {"pays", "always", "prefix_there"},
    False: {"never", "no_prefill_worker", "short", "cached", "queue", "cheaper", "aggregated"},
}


def apart(decoding: str = "a", prefilling: str = "p", **settings: Any) -> Pool:
    """Decode workers with four sequences each, and prefill workers."""
    pool = Pool("", **settings)
    pool.apart(decode=decoding, prefill=prefilling)
    for worker in decoding:
        pool.report(worker, running=4)
    return pool


def where(placement: Placement) -> tuple[bool, str]:
    assert placement.prefill is not None
    return placement.prefill.remote, placement.prefill.reason


def elsewhere(pool: Pool, request_id: str, tokens: int, *, decode: str = "a", prefill: str = "*") -> None:
    """Another router has placed this, to be computed by a prefill worker."""
    pool.event("placed", request_id, decode, tokens=tokens, uncached=tokens, blocks=0, by="r2", prefill=prefill)


# -- who ---------------------------------------------------------------------------------------------------------------


def test_prefill_workers_never_get_requests() -> None:
    pool = apart("ab", "pq", lookahead=100.0)
    for n in range(8):
        pool.offer(f"r{n}", chain(n + 1, 4))
    assert set(pool.placed().values()) <= {"a", "b"}
    pool = Pool("")
    pool.apart(prefill="p")
    pool.offer("r", LONG)
    assert pool.placed() == {}


def test_a_pool_without_a_prefill_side_says_nothing_of_prefill() -> None:
    pool = Pool("a")
    pool.offer("r", LONG)
    placement = pool.placement()
    assert placement.prefill is None
    assert announced(placement) == ""


def test_a_worker_that_changes_its_role_changes_sides() -> None:
    pool = Pool("a")
    pool.apart(decode="c")
    pool.join("a", role="prefill", handover="sim")
    assert [load.info.worker for load in pool.scheduler.workers()] == ["c"]
    pool.report("c", running=3)
    pool.offer("r1", LONG)
    assert where(pool.placement()) == (True, "pays")
    pool.event("prefilled", "r1", "c")
    pool.join("a", role="aggregated")
    assert {load.info.worker for load in pool.scheduler.workers()} == {"a", "c"}
    pool.pass_time(6)
    pool.report("c", running=7)
    pool.offer("r2", LONG)
    placement = pool.placement()
    assert (placement.worker, where(placement)) == ("a", (False, "aggregated"))


def test_the_last_prefill_worker_that_leaves_leaves_its_decode_workers_to_compute_by_themselves() -> None:
    pool = apart()
    pool.scheduler.remove_worker("p", pool.now)
    pool.offer("r", LONG)
    assert where(pool.placement()) == (False, "no_prefill_worker")


@pytest.mark.parametrize(
    ("decode", "reason"),
    [
        ({"role": "decode", "handover": "other"}, "no_prefill_worker"),
        ({"role": "decode", "handover": ""}, "aggregated"),
        ({"role": "aggregated", "handover": "sim"}, "aggregated"),
    ],
)
def test_only_workers_that_hand_over_in_the_same_way_work_together(decode: dict[str, str], reason: str) -> None:
    pool = Pool("")
    pool.apart(prefill="p")
    pool.join("a", **decode)
    pool.report("a", running=4)
    pool.offer("r", LONG)
    assert where(pool.placement()) == (False, reason)


def test_a_draining_prefill_worker_gets_nothing_more() -> None:
    pool = apart()
    pool.apart(prefill="p", draining=True)
    pool.offer("r", LONG)
    assert where(pool.placement()) == (False, "no_prefill_worker")


def test_a_prefill_worker_without_the_adapter_computes_nothing_for_it() -> None:
    pool = Pool("")
    pool.apart(decode="a", adapters=frozenset({"x"}))
    pool.apart(prefill="p")
    pool.report("a", running=4)
    pool.offer("r", LONG, adapter="x")
    assert where(pool.placement()) == (False, "no_prefill_worker")
    pool.apart(prefill="q", adapters=frozenset({"x"}))
    pool.pass_time(6)
    pool.report("a", running=4)
    pool.offer("r2", LONG, adapter="x")
    placement = pool.placement()
    assert where(placement)[0]
    assert placement.prefill is not None
    assert placement.prefill.worker in ("", "q")


# -- when it pays ------------------------------------------------------------------------------------------------------


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


# -- the queue ---------------------------------------------------------------------------------------------------------


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
    assert pool.scheduler.apart.pool.queued_tokens(pool.now) == pytest.approx(200_000, rel=0.01)
    pool.event(kind, "x", "a")
    assert pool.scheduler.apart.pool.queued_tokens(pool.now) == 0
    pool.offer("r", LONG)
    assert where(pool.placement()) == (True, "pays")


def test_own_placements_make_the_queue_deeper_and_failed_ones_do_not() -> None:
    pool = apart()
    pool.offer("r", LONG)
    placement = pool.placement()
    queue = pool.scheduler.apart.pool
    assert queue.queued_tokens(pool.now) == pytest.approx(8192, rel=0.01)
    pool.scheduler.unplace(placement, pool.now)
    assert queue.queued_tokens(pool.now) == 0


def test_jobs_that_nobody_ever_reports_are_forgotten() -> None:
    pool = apart(entry_expiry_s=1.0)
    elsewhere(pool, "x", 24_000)
    pool.pass_time(4)
    pool.decide()
    assert pool.scheduler.apart.pool.jobs == {}


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
    load = pool.scheduler.workers()[0]
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
    load = pool.scheduler.workers()[0]
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


# -- nobody is ready ---------------------------------------------------------------------------------------------------


def test_while_no_prefill_worker_is_ready_prompts_are_computed_locally_unless_told_otherwise() -> None:
    pool = apart("a", "")
    pool.offer("r", LONG)
    assert where(pool.placement()) == (False, "no_prefill_worker")


def test_wait_keeps_long_prompts_until_a_prefill_worker_comes_and_lets_short_ones_pass() -> None:
    pool = apart("a", "", prefill_unready="wait")
    pool.offer("long", LONG)
    pool.offer("short", tokens=10)
    assert pool.placed() == {"short": "a"}
    pool.pass_time(60)
    assert pool.decide() == []
    pool.apart(prefill="p")
    assert where(pool.placement()) == (True, "pays")


def test_refuse_ends_long_prompts_at_once_and_lets_short_ones_pass() -> None:
    pool = apart("a", "", prefill_unready="refuse")
    pool.offer("long", LONG)
    pool.offer("short", tokens=10)
    shed, placed = sorted(pool.decide(), key=lambda one: isinstance(one, Placement))
    assert isinstance(shed, Shed)
    assert (shed.request.id, shed.code) == ("long", "no_prefill_worker")
    assert shed.retry_after_s is not None
    assert isinstance(placed, Placement)
    assert pool.scheduler.waiting == 0


def test_workers_that_compute_their_own_prompts_are_there_for_what_decode_workers_refuse() -> None:
    pool = apart("a", "", prefill_unready="refuse")
    pool.join("b")
    pool.offer("r", LONG)
    assert pool.placed() == {"r": "b"}


def test_never_is_not_affected_by_nobody_being_ready() -> None:
    pool = apart("a", "", prefill="never", prefill_unready="refuse")
    pool.offer("r", LONG)
    assert where(pool.placement()) == (False, "never")


# -- what is said ------------------------------------------------------------------------------------------------------


def test_the_decision_can_be_explained() -> None:
    pool = apart()
    pool.offer("r", LONG)
    placement = pool.placement()
    explanation = pool.scheduler.explain("r", pool.now)
    assert explanation is not None
    assert explanation.prefill == placement.prefill
    assert explanation.candidates[0].cost_s < 2.0


def test_the_predicted_time_to_the_first_token_is_that_of_the_way_taken() -> None:
    pool = apart()
    pool.offer("r", LONG)
    placement = pool.placement()
    assert placement.predicted_ttft_s == pytest.approx(8192 / 24_000 + 0.1, abs=0.05)


def test_a_session_keeps_its_worker_wherever_its_prompts_are_computed() -> None:
    pool = apart("abcd", "p", prefill_lookahead_s=1e3)
    workers = set()
    for n in range(6):
        pool.offer(f"r{n}", chain(n + 1, 8), session="s")
        placement = pool.placement()
        assert placement.remote
        workers.add(placement.worker)
        pool.event("started", f"r{n}", placement.worker)
        pool.event("settled", f"r{n}", placement.worker)
        pool.pass_time(1)
        pool.report(placement.worker, running=4)
    assert len(workers) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefill", "sometimes"),
        ("prefill_unready", "no"),
        ("prefill_min_tokens", -1),
        ("prefill_lookahead_s", 0.0),
        ("prefill_disturbance", -1.0),
        ("prefill_patience_s", -0.1),
        ("prefill_late", float("inf")),
        ("prefill_itl_s", -0.1),
        ("prefill_wait_s", 0.0),
        ("handover_s", 0.0),
        ("handover_token_s", 0.0),
    ],
)
def test_a_setting_that_cannot_be_is_named_with_its_value(name: str, value: object) -> None:
    with pytest.raises(SettingsInvalid, match=name):
        SchedulerSettings(**{name: value})  # type: ignore[arg-type]


def test_nobody_is_disturbed_for_the_sake_of_a_few_milliseconds() -> None:
    def where(running: int, **settings: Any) -> bool:
        pool = apart(**settings)
        pool.report("a", running=running)
        pool.offer("r", tokens=400)
        placement = pool.placement()
        return placement.remote

    assert not where(0)  # there is nobody to disturb: it is sooner done where it is answered
    assert where(1)
    assert not where(1, prefill_patience_s=0.0)


# -- properties --------------------------------------------------------------------------------------------------------

TOKENS = st.integers(1, 60_000)


@settings(deadline=None)
@given(tokens=TOKENS, running=st.integers(0, 7), depths=st.lists(st.integers(0, 400_000), min_size=2, max_size=2))
def test_what_is_computed_locally_is_so_behind_any_deeper_queue(tokens: int, running: int, depths: list[int]) -> None:
    remote = []
    for depth in sorted(depths):
        pool = apart()
        pool.report("a", running=running)
        if depth:
            elsewhere(pool, "x", depth)
        pool.offer("r", tokens=tokens)
        decisions = pool.decide()  # nothing is decided while it is worth waiting for the prefill worker
        remote.append(not decisions or any(isinstance(one, Placement) and one.remote for one in decisions))
    assert remote == sorted(remote, reverse=True)


@settings(deadline=None)
@given(
    requests=st.lists(st.tuples(TOKENS, st.integers(0, 3)), max_size=12),
    prefill=st.sampled_from(["auto", "always", "never"]),
    unready=st.sampled_from(["local", "wait", "refuse"]),
    handovers=st.lists(st.sampled_from(["x", "y", ""]), min_size=1, max_size=4),
    senders=st.lists(st.sampled_from(["x", "y"]), max_size=3),
    aggregated=st.booleans(),
)
def test_every_decision_can_be_carried_out_and_has_a_reason(
    requests: list[tuple[int, int]], prefill: Any, unready: Any, handovers: list[str], senders: list[str], aggregated: bool
) -> None:
    pool = Pool("z" if aggregated else "", prefill=prefill, prefill_unready=unready)
    for n, word in enumerate(handovers):
        pool.join(f"d{n}", role="decode", handover=word)
    for n, word in enumerate(senders):
        pool.join(f"p{n}", role="prefill", handover=word)
    word_of = {f"d{n}": word for n, word in enumerate(handovers)}
    for n, (tokens, family) in enumerate(requests):
        pool.offer(f"r{n}", chain(family, tokens // BLOCK), tokens=tokens)
    seen = 0
    for _ in range(60):
        for one in pool.decide():
            seen += 1
            if isinstance(one, Shed):
                assert (one.code, unready) == ("no_prefill_worker", "refuse")
                continue
            pool.event("prefilled", one.request.id, one.worker)
            pool.event("settled", one.request.id, one.worker)
            decision = one.prefill
            assert decision is not None or (not senders and not any(handovers))
            if decision is None:
                continue
            assert decision.reason in REASONS[decision.remote]
            assert not (decision.remote and prefill == "never")
            if decision.remote:
                assert word_of[one.worker] in senders
                assert decision.worker in ("", *(f"p{n}" for n, word in enumerate(senders) if word == word_of[one.worker]))
                assert decision.wait_s > 0
            elif prefill == "always":
                assert word_of.get(one.worker, "") not in senders
        pool.pass_time(0.5)
    if unready != "wait":
        assert seen == len(requests)


def test_the_decision_fits_the_header() -> None:
    pool = apart()
    pool.offer("r", LONG)
    decision = pool.placement().prefill
    assert isinstance(decision, PrefillDecision)
