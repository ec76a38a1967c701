from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.planner.capacity import Capacity, Speed, Targets
from headrace.planner.learning import (
    AIM,
    FIRST_OUTPUT,
    HIGHEST,
    LEAST_SAMPLES,
    LOWEST,
    MARGIN,
    MOST_UP,
    DemandSeries,
    Hysteresis,
    LiveConfidence,
    PeakKeeper,
    RecentRequests,
    Rehearsal,
    SpeedCurve,
    SpeedProfile,
    StartUps,
)
from headrace.planner.observe import OutcomeSight, RequestSight, StepSight
from tests.support.planner_sights import BEGAN, seen, worker

TRUTH = Speed(base_s=0.015, prefill_s=5e-5, decode_s=4e-4, context_s=2e-8)


def learn(curve: SpeedCurve, truth: Speed, count: int, seed: int = 1) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        tokens = rng.choice((0, 0, rng.randrange(8192)))
        decodes = rng.randrange(1, 64)
        context = decodes * rng.randrange(100, 20_000)
        step_s = truth.took_s(tokens, decodes, context) * rng.uniform(0.97, 1.03)
        curve.learn(StepSight(step_s=step_s, prefill_tokens=tokens, decodes=decodes, context_tokens=context))


def test_the_curve_is_learnt_from_steps() -> None:
    curve = SpeedCurve()
    learn(curve, TRUTH, 300)
    found = curve.speed()
    assert found.prefill_s == pytest.approx(TRUTH.prefill_s, rel=0.1)
    assert found.step_s(32, 8000) == pytest.approx(TRUTH.step_s(32, 8000), rel=0.1)


def test_nothing_is_derived_from_a_handful_of_steps_unless_a_profile_seeds_the_curve() -> None:
    curve = SpeedCurve()
    learn(curve, TRUTH, LEAST_SAMPLES - 1)
    assert not curve.known
    seeded = SpeedCurve(TRUTH)
    assert seeded.known
    assert seeded.speed() == TRUTH


def test_an_engine_that_became_slower_is_learnt_anew() -> None:
    curve = SpeedCurve()
    learn(curve, TRUTH, 300)
    learn(curve, Speed(base_s=0.03, prefill_s=1e-4, decode_s=8e-4, context_s=4e-8), 1500, seed=2)
    assert curve.speed().step_s(32, 8000) == pytest.approx(2 * TRUTH.step_s(32, 8000), rel=0.1)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(1e-5, 100), st.integers(0, 10**6), st.integers(0, 4096), st.integers(0, 10**8)),
        max_size=60,
    )
)
def test_no_sample_makes_a_speed_that_cannot_be(samples: list[tuple[float, int, int, int]]) -> None:
    curve = SpeedCurve()
    for step_s, tokens, decodes, context in samples:
        curve.learn(StepSight(step_s=step_s, prefill_tokens=tokens, decodes=decodes, context_tokens=context))
    found = curve.speed()
    assert 0 < found.base_s < float("inf")
    assert 0 < found.prefill_s < float("inf")
    assert 0 < found.decode_s < float("inf")
    assert 0 <= found.context_s < float("inf")


def test_a_stored_curve_is_the_same_and_a_broken_one_is_refused() -> None:
    curve = SpeedCurve()
    learn(curve, TRUTH, 100)
    stored = curve.dump()
    again = SpeedCurve()
    again.load(stored)
    assert again.speed() == curve.speed()
    for broken in ({"_right": [1.0]}, {"_gram": [[float("nan")] * 4] * 4}, {"samples": -1}, {"samples": "x"}):
        with pytest.raises((ValueError, msgspec.ValidationError)):
            SpeedCurve().load({**stored, **broken})


def test_a_start_is_under_way_until_its_worker_is_there_and_its_time_is_measured() -> None:
    starts = StartUps(first_s=60)
    starts.see([worker("a")], at=0)
    starts.asked("aggregated", at=10)
    starts.see([worker("a")], at=15)
    assert (starts.under_way("aggregated"), starts.p90_s) == (1, 60)
    starts.see([worker("a"), worker("b")], at=40)
    assert (starts.under_way("aggregated"), starts.p90_s) == (0, 30)


def test_a_start_that_never_shows_is_given_up_so_that_it_does_not_count_as_supply_for_ever() -> None:
    starts = StartUps(first_s=60)
    starts.see([], at=0)
    starts.asked("aggregated", at=0)
    starts.see([], at=170)
    assert starts.under_way("aggregated") == 1
    starts.see([], at=181)
    assert (starts.under_way("aggregated"), starts.lost) == (0, 1)


def test_a_worker_that_somebody_else_has_started_tells_its_own_time() -> None:
    starts = StartUps(first_s=60)
    starts.see([], at=0)
    starts.see([worker("a", start_s=12.0)], at=5)
    assert starts.p90_s == 12.0


def test_the_slow_ones_count() -> None:
    starts = StartUps(first_s=60)
    starts.load({"_took": [10.0] * 8 + [50.0, 90.0], "_asked": [], "_known": None})
    assert starts.p90_s == 50.0


def test_after_a_restart_a_start_is_still_under_way() -> None:
    starts, again = StartUps(first_s=60), StartUps(first_s=60)
    starts.see([worker("a")], at=0)
    starts.asked("decode", at=10)
    again.load(starts.dump())
    again.see([worker("a"), worker("d", "decode")], at=30)
    assert (again.under_way("decode"), again.p90_s) == (0, 20)


SPEED_PROFILE_TRUTH = Speed(base_s=0.012, prefill_s=4e-5, decode_s=3e-4, context_s=1e-8)


def step(truth: Speed, rng: random.Random, *, decodes: int | None = None, noise: float = 0.02) -> StepSight:
    tokens = rng.choice((0, 0, rng.randrange(1, 2048)))
    sequences = rng.randrange(1, 33) if decodes is None else decodes
    context = sequences * rng.randrange(50, 4000)
    step_s = truth.took_s(tokens, sequences, context) * rng.uniform(1 - noise, 1 + noise)
    return StepSight(step_s=step_s, prefill_tokens=tokens, decodes=sequences, context_tokens=context)


def profiled(count: int, truth: Speed = SPEED_PROFILE_TRUTH, **kwargs: int) -> SpeedProfile:
    rng, profile = random.Random(7), SpeedProfile()
    for _ in range(count):
        profile.note("aggregated", "w", step(truth, rng, **kwargs))
    return profile


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-3, 0.1), st.floats(1e-6, 1e-3), st.floats(1e-5, 1e-3))
def test_a_profile_predicts_the_steps_of_any_engine_that_is_linear(base_s: float, prefill_s: float, decode_s: float) -> None:
    found = profiled(300, Speed(base_s=base_s, prefill_s=prefill_s, decode_s=decode_s, context_s=0.0)).roles()["aggregated"]
    assert found.error < 0.06
    assert found.near > 0.95


def test_the_first_steps_weigh_as_much_as_the_last() -> None:
    rng, profile = random.Random(3), SpeedProfile()
    slow = Speed(base_s=0.024, prefill_s=8e-5, decode_s=6e-4, context_s=2e-8)
    for truth in (SPEED_PROFILE_TRUTH, slow):
        for _ in range(600):
            profile.note("aggregated", "w", step(truth, rng, noise=0.0))
    predicted = profile.roles()["aggregated"].speed.step_s(16, 1000)
    # relative errors: the fast half pulls more, and what forgets would be at the slow engine's time
    assert predicted < 0.75 * slow.step_s(16, 1000)


def test_a_step_that_is_reported_again_counts_once_and_the_first_may_be_an_old_one() -> None:
    rng, profile = random.Random(1), SpeedProfile()
    first, second = step(SPEED_PROFILE_TRUTH, rng), step(SPEED_PROFILE_TRUTH, rng)
    for name, one in (("w", first), ("w", first), ("w", second), ("w", second), ("other", second), ("encode", first)):
        profile.note("encode" if name == "encode" else "aggregated", name, one)
    profile.note("encode", "encode", second)
    assert profile.counts() == {"aggregated": 1}, "an encoder has no role that is planned"


def test_a_role_with_too_few_steps_has_no_profile() -> None:
    assert profiled(LEAST_SAMPLES).roles() == {}
    assert set(profiled(LEAST_SAMPLES + 1).roles()) == {"aggregated"}


def test_what_the_steps_did_not_vary_in_is_named() -> None:
    assert " ".join(profiled(300).roles()["aggregated"].lacks) == ""
    assert "8 to 8 sequences" in " ".join(profiled(300, decodes=8).roles()["aggregated"].lacks)
    profile = SpeedProfile()
    for number in range(30):
        profile.note("aggregated", "w", StepSight(step_s=0.01 + number * 1e-5, prefill_tokens=0, decodes=1 + number))
        profile.note("prefill", "p", StepSight(step_s=0.01 + number * 1e-5, prefill_tokens=100 + number, decodes=0))
    found = profile.roles()
    assert "only 0 steps computed a prompt" in " ".join(found["aggregated"].lacks)
    assert " ".join(found["prefill"].lacks) == ""


def test_arrivals_become_a_rate_per_step() -> None:
    series = DemandSeries(step_s=10, keep_s=100)
    assert series.add(20, since_s=100, until_s=110) == [2.0]
    assert series.add(5, since_s=110, until_s=115) == []
    assert series.add(5, since_s=115, until_s=120) == [1.0]


def test_a_step_that_nobody_watched_is_unknown_and_not_zero() -> None:
    series = DemandSeries(step_s=10, keep_s=100)
    series.add(10, since_s=100, until_s=110)
    assert series.add(None, since_s=110, until_s=130) == [None, None]
    assert series.rate(3) == 1.0


def test_a_step_without_arrivals_that_was_watched_is_zero() -> None:
    series = DemandSeries(step_s=10, keep_s=100)
    assert series.add(0, since_s=100, until_s=120) == [0.0, 0.0]


def test_a_clock_that_goes_back_changes_nothing() -> None:
    series = DemandSeries(step_s=10, keep_s=100)
    series.add(10, since_s=100, until_s=110)
    assert series.add(50, since_s=110, until_s=90) == []
    assert list(series.values) == [1.0]


def test_what_is_older_than_the_series_is_forgotten() -> None:
    series = DemandSeries(step_s=10, keep_s=100)
    series.add(10, since_s=100, until_s=110)
    assert series.add(10, since_s=110, until_s=100_000) == []
    assert series.rate(100) is None


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0.1, 40)), min_size=1, max_size=40))
def test_no_arrival_is_lost_or_counted_twice(ticks: list[tuple[int, float]]) -> None:
    series = DemandSeries(step_s=10, keep_s=10_000)
    at, total = 1000.0, 0
    for count, took in ticks:
        series.add(count, since_s=at, until_s=at + took)
        at, total = at + took, total + count
    series.add(0, since_s=at, until_s=at + 10)
    at += 10
    assert abs(sum(value for value in series.values if value is not None) * 10 - total) <= total * 0.5 + 1e-6
    assert series.open_s is not None
    assert series.open_s <= at < series.open_s + 10


def test_a_stored_series_is_taken_over_and_one_of_other_steps_is_not() -> None:
    series = DemandSeries(step_s=10, keep_s=100)
    series.add(20, since_s=100, until_s=110)
    again, other = DemandSeries(step_s=10, keep_s=100), DemandSeries(step_s=5, keep_s=100)
    again.load(series.dump())
    assert list(again.values) == [2.0]
    other.load(series.dump())
    assert not other.values


def test_no_request_has_no_shape() -> None:
    assert RecentRequests().shape is None


def test_the_shape_has_means_and_a_long_request() -> None:
    recent = RecentRequests()
    placed = tuple(RequestSight(prompt=100 * i, uncached=50 * i) for i in range(1, 21))
    recent.note(seen(0, placed=placed))
    shape = recent.shape
    assert shape is not None
    assert (shape.prompt, shape.uncached, shape.long, shape.output) == (1050, 525, 950, FIRST_OUTPUT)
    recent.note(seen(1, outputs=(10, 30)))
    assert recent.shape is not None
    assert recent.shape.output == 20


def test_waits_are_a_quantile_and_nothing_of_too_few() -> None:
    recent = RecentRequests()
    recent.note(seen(0, placed=tuple(RequestSight(prompt=1, uncached=1, waited_s=float(i)) for i in range(20))))
    assert recent.wait_s(0.95, since_s=BEGAN) == 19.0
    assert recent.wait_s(0.95, since_s=BEGAN + 1) is None


def test_lengths_are_stored_and_taken_over() -> None:
    recent, again = RecentRequests(), RecentRequests()
    recent.note(seen(0, placed=(RequestSight(prompt=7, uncached=3),), outputs=(4,)))
    again.load(recent.dump())
    assert again.shape == recent.shape


LIVE_CONFIDENCE_TARGETS = Targets(ttft_s=2.0, itl_s=0.1, miss=0.01)
GOOD = OutcomeSight(ttft_s=1.0, itl_s=0.05)
LATE = OutcomeSight(ttft_s=2.5, itl_s=0.05)
SLOW = OutcomeSight(ttft_s=1.0, itl_s=0.2)


def confidence(first: float = 0.8, *, moves: bool = True, targets: Targets = LIVE_CONFIDENCE_TARGETS) -> LiveConfidence:
    return LiveConfidence(first, targets, moves=moves)


def test_requests_that_are_late_or_slow_make_it_higher_and_none_makes_it_lower() -> None:
    for missed in (LATE, SLOW):
        some = confidence()
        for _ in range(50):
            some.note([missed, *[GOOD] * 19])
        assert some.value > 0.82
    some = confidence()
    for _ in range(500):
        some.note([GOOD] * 20)
    assert some.value < 0.75


def test_it_stays_where_as_many_are_late_as_it_aims_at() -> None:
    some, rng = confidence(), random.Random(1)
    for _ in range(2000):
        some.note([LATE if rng.random() < AIM * LIVE_CONFIDENCE_TARGETS.miss else GOOD for _ in range(10)])
    assert abs(some.value - 0.8) < 0.05


def test_it_settles_where_fewer_are_late_than_may_be() -> None:
    """A load of which a share of 10 % and more is late below 0.9, and hardly anything above."""
    some, rng, late = confidence(0.6), random.Random(2), 0
    for look in range(6000):
        share = 0.1 * max(0.0, 0.9 - some.value)
        ended = [LATE if rng.random() < share else GOOD for _ in range(10)]
        late += ended.count(LATE) if look >= 3000 else 0
        some.note(ended)
    assert late / 30_000 < LIVE_CONFIDENCE_TARGETS.miss
    assert 0.75 < some.value < 0.9


def test_a_burst_adds_no_more_than_one_look_may() -> None:
    some = confidence()
    some.note([LATE] * 500)
    assert some.value <= 0.8 + MOST_UP + 1e-9


def test_where_more_may_be_late_it_takes_more_of_them() -> None:
    strict, lenient = confidence(), confidence(targets=Targets(ttft_s=2.0, itl_s=0.1, miss=0.1))
    for _ in range(100):
        for some in (strict, lenient):
            some.note([LATE, *[GOOD] * 29])
    assert strict.value > 0.8
    assert lenient.value < 0.8


def test_one_that_does_not_move_is_what_was_set() -> None:
    some = confidence(0.85, moves=False)
    some.note([LATE] * 100)
    some.load({"value": 0.6})
    assert some.value == 0.85


@given(
    st.floats(0.5, 0.999),
    st.lists(st.lists(st.sampled_from([GOOD, LATE, SLOW]), max_size=40), max_size=300),
)
def test_it_never_leaves_its_bounds(first: float, looks: list[list[OutcomeSight]]) -> None:
    some = confidence(first)
    for ended in looks:
        some.note(ended)
        assert min(LOWEST, first) <= some.value <= max(HIGHEST, first)


def test_a_stored_value_is_taken_over_and_one_that_cannot_be_is_not() -> None:
    some = confidence()
    some.load({"value": 0.9})
    assert some.value == 0.9
    for wrong in (0.0, 1.5, float("nan")):
        some.load({"value": wrong})
        assert some.value == 0.9


ONE = Capacity(per_s=4.0, sequences=16, slack_s=3.0)
PEAK_KEEPER_TARGETS = Targets(ttft_s=4.0, itl_s=0.25)


def keeper() -> PeakKeeper:
    return PeakKeeper(PEAK_KEEPER_TARGETS, season_s=86_400.0)


def pass_steps(some: PeakKeeper, rate: float | None, count: int, *, start_s: float) -> None:
    for _ in range(count):
        some.note(rate, ONE, step_s=5.0, start_s=start_s, most=20)


def end(some: PeakKeeper, *, late: int, others: int) -> None:
    """Have so many requests end late, one half at the first token and one between tokens, and so many in time."""
    some.note_ended([OutcomeSight(ttft_s=9.0)] * (late // 2) + [OutcomeSight(ttft_s=0.1, itl_s=9.0)] * (late - late // 2))
    some.note_ended([OutcomeSight(ttft_s=0.1)] * others)


def bursts(some: PeakKeeper, *, start_s: float, late: int = 40) -> None:
    """Pass two hours with a burst in each that rises within two minutes, and so many late ones of 2,000 requests."""
    end(some, late=late, others=2000 - late)
    for _ in range(2):
        pass_steps(some, 1.0, 480, start_s=start_s)
        for step in range(24):
            pass_steps(some, 1.0 + 11.0 * step / 24, 1, start_s=start_s)
        pass_steps(some, 12.0, 120, start_s=start_s)


def test_the_peak_is_kept_where_bursts_come_sooner_than_workers_and_not_where_these_are_quick() -> None:
    slow, quick = keeper(), keeper()
    bursts(slow, start_s=300.0)
    bursts(quick, start_s=10.0)
    assert slow.rate == pytest.approx(MARGIN * 12.0)
    assert quick.rate == 0.0


def test_bursts_that_forecasts_foresee_keep_nothing() -> None:
    some = keeper()
    bursts(some, start_s=300.0, late=15)
    assert some.rate == 0.0


def test_many_requests_that_really_are_late_are_enough_and_keeping_ends_long_after() -> None:
    some = keeper()
    pass_steps(some, 3.0, 10, start_s=10.0)
    end(some, late=62, others=1938)
    pass_steps(some, 3.0, 1, start_s=10.0)
    assert some.keeping
    end(some, late=0, others=16_000)
    pass_steps(some, 3.0, 1, start_s=10.0)
    assert some.keeping, "a ninth of the limit"
    end(some, late=0, others=4000)
    pass_steps(some, 3.0, 1, start_s=10.0)
    assert not some.keeping


def test_a_few_late_requests_say_nothing() -> None:
    some = keeper()
    some.note_ended([OutcomeSight(ttft_s=9.0)] * 29)
    pass_steps(some, 1.0, 5, start_s=10.0)
    assert not some.keeping


def test_a_peak_is_forgotten_after_a_day() -> None:
    some = keeper()
    bursts(some, start_s=300.0)
    pass_steps(some, 2.0, 25 * 720, start_s=300.0)
    some.keeping = True
    assert some.rate == pytest.approx(MARGIN * 2.0)


def test_an_unknown_step_changes_nothing() -> None:
    some = keeper()
    bursts(some, start_s=300.0)
    before = some.dump()
    pass_steps(some, None, 10, start_s=300.0)
    assert some.dump() == before


def test_what_is_stored_is_taken_over() -> None:
    some, other = keeper(), keeper()
    bursts(some, start_s=300.0)
    other.load(some.dump())
    assert other.rate == some.rate > 0
    for one in (some, other):
        bursts(one, start_s=300.0)
    assert other.rate == some.rate
    assert other.dump() == some.dump()
    with pytest.raises(msgspec.ValidationError):
        other.load({**some.dump(), "_peaks": []})


def test_in_the_rehearsal_workers_come_a_start_up_after_the_load_and_leave_two_later() -> None:
    pool = Rehearsal()
    for _ in range(4):
        pool.step(10.0, 3, ONE, seconds=5.0, start_s=20.0)
    assert pool.workers == 1
    pool.step(10.0, 3, ONE, seconds=5.0, start_s=20.0)
    assert pool.workers == 3
    for _ in range(3):
        pool.step(1.0, 1, ONE, seconds=5.0, start_s=20.0)
    assert pool.workers == 3, "two start-ups are not over"
    pool.step(1.0, 1, ONE, seconds=5.0, start_s=20.0)
    assert pool.workers == 1
    assert pool.late == 0.0


def test_a_rehearsal_that_begins_amid_the_load_calls_nothing_late_before_it_has_its_workers() -> None:
    some = keeper()
    pass_steps(some, 12.0, 1000, start_s=100.0)
    assert not some.keeping


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(0, 1e4)), max_size=60), st.floats(1, 1000), st.integers(1, 30))
def test_whatever_arrives_the_kept_load_is_none_or_a_little_above_the_highest(
    rates: list[float | None], start_s: float, most: int
) -> None:
    some = keeper()
    for rate in rates:
        some.note(rate, ONE, step_s=5.0, start_s=start_s, most=most)
        highest = max((one for one in rates if one is not None), default=0.0)
        assert 0.0 <= some.rate <= MARGIN * highest * (1 + 1e-9)
        if not some.keeping:
            assert some.rate == 0.0


def test_the_most_that_was_needed_lately_counts() -> None:
    some = Hysteresis(window_s=60)
    assert some.note(5, at=0) == 5
    assert some.note(2, at=30) == 5
    assert some.note(2, at=61) == 2


def test_a_number_that_went_up_stays_for_two_start_ups() -> None:
    some = Hysteresis(window_s=60)
    assert some.may_go_down(at=0, start_s=100)
    some.up_s = 0
    assert not some.may_go_down(at=199, start_s=100)
    assert some.may_go_down(at=200, start_s=100)


def test_a_history_is_stored_and_taken_over() -> None:
    some, again = Hysteresis(window_s=60), Hysteresis(window_s=60)
    some.note(5, at=0)
    some.up_s = 0
    again.load(some.dump())
    assert again.note(1, at=10) == 5
    assert not again.may_go_down(at=10, start_s=100)
