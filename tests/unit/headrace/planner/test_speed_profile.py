from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.planner.observation import StepSight
from headrace.planner.speed_curve import LEAST_SAMPLES, Speed
from headrace.planner.speed_profile import RoleProfile, SpeedProfile

TRUTH = Speed(base_s=0.012, prefill_s=4e-5, decode_s=3e-4, context_s=1e-8)


def step(truth: Speed, rng: random.Random, *, decodes: int | None = None, noise: float = 0.02) -> StepSight:
    tokens = rng.choice((0, 0, rng.randrange(1, 2048)))
    sequences = rng.randrange(1, 33) if decodes is None else decodes
    context = sequences * rng.randrange(50, 4000)
    step_s = truth.base_s + tokens * truth.prefill_s + sequences * truth.decode_s + context * truth.context_s
    return StepSight(
        step_s=step_s * rng.uniform(1 - noise, 1 + noise), prefill_tokens=tokens, decodes=sequences, context_tokens=context
    )


def profiled(count: int, truth: Speed = TRUTH, **kwargs: int) -> SpeedProfile:
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
    for truth in (TRUTH, slow):
        for _ in range(600):
            profile.note("aggregated", "w", step(truth, rng, noise=0.0))
    predicted = profile.roles()["aggregated"].speed.step_s(16, 1000)
    # relative errors: the fast half pulls more, and what forgets would be at the slow engine's time
    assert predicted < 0.75 * slow.step_s(16, 1000)


def test_a_step_that_is_reported_again_counts_once_and_the_first_may_be_an_old_one() -> None:
    rng, profile = random.Random(1), SpeedProfile()
    first, second = step(TRUTH, rng), step(TRUTH, rng)
    assert not profile.note("aggregated", "w", first)
    assert not profile.note("aggregated", "w", first)
    assert profile.note("aggregated", "w", second)
    assert not profile.note("aggregated", "w", second)
    assert not profile.note("aggregated", "other", second)
    assert profile.count("aggregated") == 1


@pytest.mark.parametrize("role", ["encode", ""])
def test_what_is_no_step_of_a_planned_role_is_left_out(role: str) -> None:
    profile = SpeedProfile()
    assert not profile.note(role, "w", step(TRUTH, random.Random(1)))
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
