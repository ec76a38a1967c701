"""Tests of the figures that `benchmarks.fault_pauses` prints."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.fault_pauses import Asked, Noticed, questions
from headrace.tools.chaos.ledger import Outcome


def asked(*came_s: float, outcome: Outcome = Outcome.ANSWERED) -> Asked:
    (question,) = questions(Random(1), 1, 4)
    one = Asked(question)
    one.sent_s, one.came_s, one.outcome = came_s[0] - 1.0 if came_s else 0.0, list(came_s), outcome
    return one


def test_a_pause_counts_when_it_ended_after_the_fault() -> None:
    stream = asked(0.0, 3.0, 3.1, 4.1)
    assert stream.pause_s(since_s=3.05) == pytest.approx(1.0)
    assert stream.pause_s(since_s=1.0) == 3.0  # it had begun before the fault
    assert stream.pause_s(since_s=9.0) == 0.0


def test_the_row_counts_streams_that_stood_and_requests_that_were_refused() -> None:
    noticed = Noticed()
    noticed.add([asked(0.0, 0.1), asked(0.0, 6.0)], [asked(2.0), asked(outcome=Outcome.REFUSED)], 0.0)
    assert noticed.row("a fault") == "| a fault | 1 of 2 | 6.00 | 6.00 | 6.00 | 1 | 1.00 | 1.00 | 1 | 3 answered, 1 refused |"
