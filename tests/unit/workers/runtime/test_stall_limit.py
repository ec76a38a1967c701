"""The stall limit follows the steps that were seen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.runtime.stall_limit import LEAST_S, WINDOW_S, StallLimit

SECONDS = st.floats(min_value=1e-6, max_value=1e4)


def limit(setting_s: float, *steps: float) -> float:
    made = StallLimit(setting_s)
    for step in steps:
        made.step(step)
    return made.limit_s


def test_until_a_step_was_seen_it_is_the_setting() -> None:
    assert limit(120.0) == 120.0


def test_it_follows_the_longest_step() -> None:
    assert limit(120.0, 0.02, 0.05) == LEAST_S
    assert limit(120.0, 0.02, 2.0, 0.02) == 40.0
    assert limit(120.0, 30.0) == 120.0
    assert limit(120.0, 90.0) == 270.0


@given(SECONDS, st.lists(SECONDS, min_size=1))
def test_no_step_as_long_as_one_that_was_seen_is_a_stall_and_the_setting_holds_for_fast_engines(
    setting_s: float, steps: list[float]
) -> None:
    found, longest = limit(setting_s, *steps), max(steps)
    assert found >= 3 * longest
    if 3 * longest <= setting_s:
        assert found <= setting_s
    assert found >= min(LEAST_S, setting_s)


@given(SECONDS, st.lists(SECONDS, min_size=1), SECONDS)
def test_a_longer_step_never_makes_it_shorter(setting_s: float, steps: list[float], more: float) -> None:
    assert limit(setting_s, *steps, max(*steps, more) + more) >= limit(setting_s, *steps)


@given(st.lists(st.tuples(SECONDS, st.floats(min_value=0.0, max_value=2 * WINDOW_S)), min_size=1))
def test_a_step_is_remembered_for_a_window_and_forgotten_after_two(steps: list[tuple[float, float]]) -> None:
    made, now = StallLimit(120.0), 0.0
    made.roll(now)
    seen: list[tuple[float, float]] = []
    for step, pause_s in steps:
        made.step(step)
        seen.append((now, step))
        until_s = now + pause_s
        while now < until_s:  # rolled every second
            now = min(until_s, now + 1.0)
            made.roll(now)
    lately = [step for at, step in seen if now - at <= WINDOW_S - 2]
    if lately:
        assert made.limit_s >= 3 * max(lately)
    if all(now - at > 2 * WINDOW_S + 2 for at, _ in seen):
        assert made.limit_s == 120.0


def test_an_idle_engine_is_one_that_nothing_is_known_of() -> None:
    made = StallLimit(120.0)
    made.roll(0.0)
    made.step(0.02)
    for second in range(int(2 * WINDOW_S) + 2):
        made.roll(float(second))
    assert made.limit_s == 120.0
