"""The watchdog: its limit follows the steps, waits for other workers are no stalls, and nothing is expected in a pause."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.runtime import watchdog as stall_limit
from headrace.workers.runtime.watchdog import LEAST_S, WINDOW_S, EngineWork, StallLimit, Watchdog
from tests.support.virtual_time import in_virtual_time


class Engine:
    async def died(self) -> str:
        return await asyncio.get_running_loop().create_future()


def stalls(monkeypatch: pytest.MonkeyPatch, *, waiting: bool = False, suspended: int = 0, resumed: int = 0) -> bool:
    found: list[bool] = []

    async def main() -> None:
        found.append(await _stalls(monkeypatch, waiting=waiting, suspended=suspended, resumed=resumed))

    in_virtual_time(main)
    return found[0]


async def _stalls(monkeypatch: pytest.MonkeyPatch, *, waiting: bool, suspended: int, resumed: int) -> bool:
    """Whether an engine counts as dead half a second after quick steps, where the setting alone would allow 0.9 s."""
    monkeypatch.setattr(stall_limit, "LEAST_S", 0.05)
    watchdog = Watchdog(Engine(), EngineWork(lambda: 1, lambda: waiting), stall_s=0.9)
    monkeypatch.setattr(watchdog, "_check_every_s", 0.01)
    watchdog.begin()
    for _ in range(3):
        await asyncio.sleep(0.001)
        watchdog.stepped()
    for _ in range(suspended):
        watchdog.suspend()
    for _ in range(resumed):
        watchdog.resume()
    task = asyncio.create_task(watchdog.watch_stall())
    await asyncio.wait([task], timeout=0.5)
    task.cancel()
    return watchdog.dead.done()


def test_an_engine_that_made_quick_steps_is_missed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stalls(monkeypatch)


def test_a_sequence_that_waits_for_another_worker_has_the_time_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not stalls(monkeypatch, waiting=True)


@pytest.mark.parametrize(("suspended", "resumed", "missed"), [(1, 0, False), (2, 1, False), (2, 2, True), (1, 3, True)])
def test_every_reason_not_to_expect_steps_has_to_end(
    monkeypatch: pytest.MonkeyPatch, suspended: int, resumed: int, missed: bool
) -> None:
    assert stalls(monkeypatch, suspended=suspended, resumed=resumed) is missed


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
