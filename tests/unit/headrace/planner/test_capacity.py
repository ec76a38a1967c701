from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.planner.capacity import (
    LEAST_SAMPLES,
    RoleProfile,
    Shape,
    Speed,
    SpeedCurve,
    SpeedProfile,
    StartUps,
    Targets,
    aggregated_capacity,
    decode_capacity,
    late_share,
    prefill_capacity,
    workers_for,
)
from headrace.planner.observe import StepSight
from tests.support.planner_sights import worker

SPEED = Speed(base_s=0.01, prefill_s=1e-4, decode_s=1e-3, context_s=0.0)
SHAPE = Shape(prompt=1000, uncached=1000, output=100, long=2000)
TARGETS = Targets(ttft_s=2.0, itl_s=0.05)


def test_decode_is_bounded_by_the_time_between_tokens() -> None:
    found = decode_capacity(SPEED, SHAPE, TARGETS, slots=0, kv_tokens=0)
    assert found.sequences == 40  # 10 ms and 1 ms for each
    assert abs(found.per_s - 40 / (100 * 0.05)) < 1e-9


def test_decode_is_bounded_by_slots_and_by_the_kv_cache() -> None:
    assert decode_capacity(SPEED, SHAPE, TARGETS, slots=8, kv_tokens=0).sequences == 8
    assert decode_capacity(SPEED, SHAPE, TARGETS, slots=0, kv_tokens=5250).sequences == 5


def test_prompts_take_their_share_of_an_aggregated_worker() -> None:
    both = aggregated_capacity(SPEED, SHAPE, TARGETS, slots=0, kv_tokens=0)
    assert both.per_s < decode_capacity(SPEED, SHAPE, TARGETS, slots=0, kv_tokens=0).per_s
    assert both.per_s < 1 / 0.1


def test_longer_context_slows_decode() -> None:
    slow = Speed(base_s=0.01, prefill_s=1e-4, decode_s=1e-3, context_s=1e-6)
    assert (
        decode_capacity(slow, SHAPE, TARGETS, slots=0, kv_tokens=0).per_s
        < decode_capacity(SPEED, SHAPE, TARGETS, slots=0, kv_tokens=0).per_s
    )


def test_a_prompt_that_alone_is_later_than_the_target_makes_no_negative_target_and_no_unbounded_growth() -> None:
    long = Shape(prompt=60_000, uncached=60_000, output=10, long=90_000)
    for found in (
        prefill_capacity(SPEED, long, TARGETS),
        aggregated_capacity(SPEED, long, TARGETS, slots=64, kv_tokens=0),
    ):
        assert not found.reachable
        assert found.slack_s > 0
        assert workers_for(0.5 * found.per_s, found, TARGETS, most=1000) <= 8
        assert workers_for(10 * found.per_s, found, TARGETS, most=1000) <= 30


def test_a_step_that_alone_is_later_than_the_target_is_told() -> None:
    found = decode_capacity(Speed(base_s=0.2), SHAPE, TARGETS, slots=16, kv_tokens=0)
    assert not found.reachable
    assert found.per_s > 0


def test_no_requests_need_no_workers() -> None:
    found = prefill_capacity(SPEED, SHAPE, TARGETS)
    assert workers_for(0.0, found, TARGETS, most=5) == 0
    assert workers_for(float("nan"), found, TARGETS, most=5) == 0


speeds = st.builds(
    Speed,
    base_s=st.floats(1e-4, 0.5),
    prefill_s=st.floats(1e-6, 1e-2),
    decode_s=st.floats(1e-6, 1e-2),
    context_s=st.floats(0, 1e-6),
)
shapes = st.builds(
    Shape, prompt=st.floats(0, 1e5), uncached=st.floats(0, 1e5), output=st.floats(0, 1e4), long=st.floats(0, 2e5)
)
target = st.builds(Targets, ttft_s=st.floats(0.001, 60), itl_s=st.floats(0.001, 1), miss=st.floats(0.0001, 0.5))


@given(speeds, shapes, target, st.integers(0, 512), st.integers(0, 10**7), st.floats(0, 1e4))
def test_whatever_the_figures_more_load_never_needs_fewer_workers(
    speed: Speed, shape: Shape, targets: Targets, slots: int, kv: int, rate: float
) -> None:
    for found in (
        prefill_capacity(speed, shape, targets),
        decode_capacity(speed, shape, targets, slots=slots, kv_tokens=kv),
        aggregated_capacity(speed, shape, targets, slots=slots, kv_tokens=kv),
    ):
        assert found.per_s > 0
        assert found.sequences >= 1
        few = workers_for(rate, found, targets, most=50)
        assert 0 <= few <= workers_for(rate * 1.5, found, targets, most=50) <= 50


@given(st.integers(1, 30), st.floats(0.1, 100), shapes, target)
def test_more_workers_are_never_later(workers: int, rate: float, shape: Shape, targets: Targets) -> None:
    found = prefill_capacity(SPEED, shape, targets)
    assert 0 <= late_share(workers + 1, rate, found) <= late_share(workers, rate, found) + 1e-9 <= 1 + 1e-9


TRUTH = Speed(base_s=0.015, prefill_s=5e-5, decode_s=4e-4, context_s=2e-8)


def learn(curve: SpeedCurve, truth: Speed, count: int, seed: int = 1) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        tokens = rng.choice((0, 0, rng.randrange(8192)))
        decodes = rng.randrange(1, 64)
        context = decodes * rng.randrange(100, 20_000)
        step = truth.base_s + tokens * truth.prefill_s + decodes * truth.decode_s + context * truth.context_s
        curve.learn(step * rng.uniform(0.97, 1.03), prefill_tokens=tokens, decodes=decodes, context_tokens=context)


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


@pytest.mark.parametrize("step_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_without_a_time_teaches_nothing(step_s: float) -> None:
    curve = SpeedCurve()
    assert not curve.learn(step_s, prefill_tokens=100, decodes=1, context_tokens=0)
    assert not curve.learn(0.01, prefill_tokens=0, decodes=0, context_tokens=0)
    assert curve.samples == 0


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
        curve.learn(step_s, prefill_tokens=tokens, decodes=decodes, context_tokens=context)
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
    step_s = truth.base_s + tokens * truth.prefill_s + sequences * truth.decode_s + context * truth.context_s
    return StepSight(
        step_s=step_s * rng.uniform(1 - noise, 1 + noise), prefill_tokens=tokens, decodes=sequences, context_tokens=context
    )


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
    assert not profile.note("aggregated", "w", first)
    assert not profile.note("aggregated", "w", first)
    assert profile.note("aggregated", "w", second)
    assert not profile.note("aggregated", "w", second)
    assert not profile.note("aggregated", "other", second)
    assert profile.count("aggregated") == 1


@pytest.mark.parametrize("role", ["encode", ""])
def test_what_is_no_step_of_a_planned_role_is_left_out(role: str) -> None:
    profile = SpeedProfile()
    assert not profile.note(role, "w", step(SPEED_PROFILE_TRUTH, random.Random(1)))
    assert not profile.note("decode", "w", StepSight(step_s=0.01, prefill_tokens=0, decodes=0))
    assert not profile.note("decode", "w", StepSight(step_s=0.0, prefill_tokens=1, decodes=0))
    assert profile.roles() == {}


def test_a_role_with_too_few_steps_has_no_profile() -> None:
    assert profiled(LEAST_SAMPLES).roles() == {}
    assert set(profiled(LEAST_SAMPLES + 1).roles()) == {"aggregated"}


def lacks(found: RoleProfile) -> str:
    return " ".join(found.lacks)


def test_what_the_steps_did_not_vary_in_is_named() -> None:
    assert lacks(profiled(300).roles()["aggregated"]) == ""
    assert "8 to 8 sequences" in lacks(profiled(300, decodes=8).roles()["aggregated"])
    profile = SpeedProfile()
    for number in range(30):
        profile.note("aggregated", "w", StepSight(step_s=0.01 + number * 1e-5, prefill_tokens=0, decodes=1 + number))
        profile.note("prefill", "p", StepSight(step_s=0.01 + number * 1e-5, prefill_tokens=100 + number, decodes=0))
    found = profile.roles()
    assert "only 0 steps computed a prompt" in lacks(found["aggregated"])
    assert lacks(found["prefill"]) == ""
