"""A change that makes a request dearer is noticed, whatever else the machine does."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.router.placement.scheduler import Scheduler
from tests.simulation.cost.written_costs import ACCEPT, GROWTH, PYTHON, Calls, count, growth, written


@pytest.fixture
def before() -> Calls:
    found = written()
    if found is None:
        pytest.skip(f"nothing is written down for Python {PYTHON}: {ACCEPT}")
    return found


def test_a_request_costs_no_process_more_calls_than_are_written_down(before: Calls) -> None:
    grown = growth(before, count())
    assert not grown, "\n".join(grown)


def test_a_router_that_does_more_for_each_request_is_named(before: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = Scheduler.offer

    def dear(self: Scheduler, *args: Any) -> Any:
        for _ in range(30):
            _ = self.waiting
        return offer(self, *args)

    monkeypatch.setattr(Scheduler, "offer", dear)
    texts = growth(before, count())
    assert len(texts) == 1, "\n".join(texts)
    text = texts[0]
    assert "costs the router" in text
    assert "router/placement/ +" in text
    assert ACCEPT in text


def test_growth_below_the_bound_is_none_and_growth_above_it_is() -> None:
    before: Calls = {"worker": {"broker": 60.0, "workers/kv": 40.0}, "router": {"router": 10.0}}
    assert growth(before, {"worker": {"broker": 62.9, "workers/kv": 40.0}, "router": {"router": 9.0}}) == []
    (text,) = growth(before, {"worker": {"broker": 60.0, "workers/kv": 40.0, "workers/new": 100 * GROWTH + 1}})
    assert "the worker 104 calls, 100 are written down (+4.0%). Most of it: workers/new/ +4.0." in text


def test_a_process_that_is_not_written_down_is_growth() -> None:
    assert len(growth({}, {"encoder": {"workers": 1.0}})) == 1
