"""The state of an engine by its last report, and what that says of a prompt that is placed on it."""

from __future__ import annotations

from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.router.placement.first_tokens.engine_now import (
    MOST_ALIKE,
    EngineNow,
    engine_now,
    until_computed_s,
    until_last_step_s,
)
from tests.support.router.reported_worker import loads


def test_an_idle_engine_takes_a_step_with_the_prompt() -> None:
    _, load = loads(running=0)
    assert until_computed_s(engine_now(load, 0.0), 1000) == pytest.approx(0.1 + 0.01)


def test_a_prompt_waits_for_the_rest_of_the_step_that_runs_and_not_for_all_of_it() -> None:
    _, load = loads(running=1, step_s=0.9, step_prefill_tokens=8192, queued_prefill_tokens=4096)
    assert engine_now(load, 0.0).running_s == pytest.approx(0.45)
    assert engine_now(load, 0.25).running_s == pytest.approx(0.2)


def test_prompts_that_no_step_has_begun_with_are_before_it() -> None:
    _, load = loads(running=2, waiting=1, step_s=0.9, step_prefill_tokens=8192, queued_prefill_tokens=8192 + 3000)
    load.place("other", tokens=500, blocks=1, now_s=0.0)
    now = engine_now(load, 0.0)
    assert (now.before, now.state) == (3500.0, "filling")
    steps = 0.9 + (3500 + 9000) / 10_000 + 2 * (0.01 + 3 * 0.001)
    assert until_computed_s(now, 9000) == pytest.approx(steps)


def test_half_of_a_step_that_only_decodes_is_left() -> None:
    _, load = loads(running=3, step_s=0.02, step_decodes=3)
    now = engine_now(load, 5.0)
    assert (now.running_s, now.state) == (0.01, "decoding")


def test_of_a_worker_without_a_report_only_what_was_placed_is_known() -> None:
    _, load = loads()
    load.place("other", tokens=500, blocks=1, now_s=0.0)
    assert engine_now(load, 1.0).before == 500.0


@given(
    st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 8192), st.floats(0, 10), st.integers(0, 64), st.floats(0, 100)
)
def test_whatever_is_reported_a_prediction_is_finite_and_longer_prompts_never_come_sooner(
    tokens: int, queued: int, in_step: int, step_s: float, running: int, now_s: float
) -> None:
    _, load = loads(running=running, step_s=step_s, step_prefill_tokens=in_step, queued_prefill_tokens=queued)
    now = engine_now(load, now_s)
    shorter, longer = until_computed_s(now, max(tokens, 1)), until_computed_s(now, tokens + 100)
    assert isfinite(longer)
    assert 0.0 < shorter <= longer


@given(st.floats(0.0, 100.0), st.floats(0.0, 1e5), st.floats(1.0, 1e5))
def test_more_before_it_never_makes_a_prompt_sooner(running_s: float, before: float, tokens: float) -> None:
    now = EngineNow(running_s=running_s, before=before, step_s=0.01, token_s=1e-4, step_tokens=8192.0, slot_wait_s=0.0)
    assert until_computed_s(now._replace(before=before + 100.0), tokens) >= until_computed_s(now, tokens)
    assert until_computed_s(now._replace(running_s=running_s + 1.0), tokens) >= until_computed_s(now, tokens)


def test_of_steps_that_only_decode_the_end_of_one_tells_when_the_next_end() -> None:
    _, load = loads(running=3, step_s=0.02, step_decodes=3)
    at_s = 1.0 + 4 * 0.02
    assert engine_now(load, at_s + 0.003, ended_s=1.0).running_s == pytest.approx(0.017)
    assert engine_now(load, at_s + 0.017, ended_s=1.0).running_s == pytest.approx(0.003)
    now = engine_now(load, at_s + 0.017, ended_s=1.0, way_s=0.005)
    assert now.running_s == pytest.approx(0.018), "it comes after that step"
    assert engine_now(load, 1.0 + (MOST_ALIKE + 1) * 0.02, ended_s=1.0).running_s == 0.01, "too many steps ago"


def test_what_a_report_tells_was_so_when_it_was_sent() -> None:
    _, load = loads(running=1, step_s=0.9, step_prefill_tokens=8192, queued_prefill_tokens=4096)
    now = engine_now(load, 0.1, way_s=0.02)
    assert now.running_s == pytest.approx(0.45 - 0.1 - 2 * 0.02)
    assert until_computed_s(now, 1000) == pytest.approx(0.45 - 0.02 - 0.1 + 0.1 + 0.011)


def test_a_queue_that_was_reported_is_in_the_step_that_runs_once_the_one_before_has_ended() -> None:
    _, load = loads(running=3, waiting=1, step_s=0.02, step_decodes=3, queued_prefill_tokens=4000)
    step_s = 4000 / 10_000 + 0.01 + 3 * 0.001
    assert engine_now(load, 0.005)[:2] == pytest.approx((0.005, 4000.0))
    assert engine_now(load, 0.1)[:2] == pytest.approx((0.01 + step_s - 0.1, 0.0))
    assert engine_now(load, 1.0).state == "decoding"
    assert engine_now(load, 1.0).running_s < 0.02


def test_a_long_queue_takes_several_steps() -> None:
    _, load = loads(running=1, step_s=0.02, step_decodes=1, queued_prefill_tokens=20_000)
    step_s = 8192 / 10_000 + 0.01 + 0.001
    assert engine_now(load, 1.0)[:2] == pytest.approx((0.01 + 2 * step_s - 1.0, 20_000 - 2 * 8192))


def test_what_was_placed_and_has_arrived_is_in_the_step_that_began_after_that() -> None:
    _, load = loads(running=0)
    load.place("other", tokens=2000, blocks=1, now_s=1.0)
    assert engine_now(load, 1.0)[:2] == (0.0, 2000.0)
    now = engine_now(load, 1.05)
    assert now[:2] == pytest.approx((0.2 + 0.011 - 0.05, 0.0))
    load.place("late", tokens=300, blocks=1, now_s=1.05)
    assert engine_now(load, 1.1).before == 300.0, "it waits for the next one"


def test_a_report_of_long_ago_ends_the_same_way() -> None:
    _, load = loads(running=1, step_s=0.02, step_decodes=1, queued_prefill_tokens=10**8)
    now = engine_now(load, 1e6)
    assert isfinite(until_computed_s(now, 100.0))
    assert now.before > 0


def test_a_prompt_of_several_steps_can_be_joined_until_its_last_one_begins() -> None:
    now = EngineNow(running_s=0.5, before=0.0, step_s=0.01, token_s=1e-4, step_tokens=8192.0, slot_wait_s=0.0)
    assert until_last_step_s(now, 8192.0) == 0.5
    assert until_last_step_s(now, 8193.0) == pytest.approx(0.5 + 0.8192 + 0.01)
    assert until_last_step_s(now, 20_000.0) < until_computed_s(now, 20_000.0)
