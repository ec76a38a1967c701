from __future__ import annotations

import pytest

from headrace.broker.messages import JobEvent
from headrace.planner import request_outcomes
from headrace.planner.request_outcomes import RequestOutcomes


def told(outcomes: RequestOutcomes, *events: tuple[float, str, str], tokens: int = 11, attempt: int = 1) -> None:
    """Have events heard: (time, kind, id)."""
    for at, kind, request_id in events:
        outcomes.on_event(JobEvent(kind, request_id, attempt, "w", tokens=tokens), at)  # type: ignore[arg-type]


def test_times_are_from_arrival_to_first_token_and_between_tokens() -> None:
    outcomes = RequestOutcomes()
    told(outcomes, (10.0, "placed", "a"), (10.5, "prefilled", "a"), (12.5, "settled", "a"))
    outcomes.waited("a", 3.0)
    ((worker, one),) = outcomes.take()
    assert worker == "w"
    assert one.ttft_s == pytest.approx(3.5)
    assert one.itl_s == pytest.approx(0.2)
    assert outcomes.take() == [], "once"


def test_a_wait_that_is_told_before_the_end_counts_as_well() -> None:
    outcomes = RequestOutcomes()
    told(outcomes, (10.0, "placed", "a"))
    outcomes.waited("a", 3.0)
    told(outcomes, (10.5, "prefilled", "a"), (10.6, "settled", "a"), tokens=1)
    ((_, one),) = outcomes.take()
    assert (one.ttft_s, one.itl_s) == (pytest.approx(3.5), pytest.approx(0.1))


def test_a_request_that_moves_has_its_first_token_once_and_lost_time_is_part_of_it() -> None:
    outcomes = RequestOutcomes()
    told(outcomes, (10.0, "placed", "a"), (11.0, "prefilled", "a"))
    told(outcomes, (14.0, "placed", "a"), (15.0, "prefilled", "a"), (16.0, "settled", "a"), attempt=2)
    ((_, one),) = outcomes.take()
    assert (one.ttft_s, one.itl_s) == (pytest.approx(1.0), pytest.approx(0.5))


def test_of_a_request_whose_beginning_was_not_heard_nothing_is_said() -> None:
    outcomes = RequestOutcomes()
    told(outcomes, (10.0, "prefilled", "a"), (11.0, "settled", "a"))
    told(outcomes, (10.0, "placed", "b"), (11.0, "settled", "b"))
    told(outcomes, (10.0, "placed", "c"), attempt=2)
    outcomes.waited("d", 1.0)
    assert outcomes.take() == []


def test_requests_that_never_end_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_outcomes, "MOST", 3)
    outcomes = RequestOutcomes()
    for n in range(10):
        told(outcomes, (float(n), "placed", f"r{n}"))
    assert len(outcomes._open) == 3
    for n in range(10):
        told(outcomes, (20.0, "prefilled", f"r{n}"), (21.0, "settled", f"r{n}"))
    assert len(outcomes.take()) == 3
