"""What comes in crowds is handled over several turns of the loop, in order, and others have theirs in between."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from headrace.frontend.http import loop as loop_budget
from headrace.frontend.http.loop import LoopBudget


class Clock:
    """Goes on by a second whenever it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(loop_budget, "time", clock)
    return clock


async def test_a_turn_is_late_once_its_budget_is_used_up_and_the_next_one_is_not(clock: Clock) -> None:
    budget = LoopBudget(asyncio.get_running_loop(), budget_s=2.5)
    assert [budget.is_spent() for _ in range(5)] == [False, False, False, True, True]
    await asyncio.sleep(0)
    assert not budget.is_spent()


async def test_work_that_fails_does_not_keep_the_rest_from_running(clock: Clock) -> None:
    loop = asyncio.get_running_loop()
    told: list[str] = []
    loop.set_exception_handler(lambda _, context: told.append(str(context["exception"])))
    budget = LoopBudget(loop, budget_s=100.0)

    def fail() -> None:
        raise ValueError("broken")

    done: list[int] = []
    budget.defer(fail)
    budget.defer(partial(done.append, 1))
    for _ in range(3):
        await asyncio.sleep(0)
    assert done == [1]
    assert told == ["broken"]
