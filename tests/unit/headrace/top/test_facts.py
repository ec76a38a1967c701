"""A worker's row says what its lease and its last load report say, and that there is none."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.broker.messages import LoadReport, WorkerMember
from headrace.top.facts import STALE_S, worker_row


def member(**more: Any) -> WorkerMember:
    return WorkerMember(worker="w", pool="p", model="m", slots=8, **more)


def report(at: float = 100.0, **more: Any) -> LoadReport:
    return LoadReport(**({"worker": "w", "epoch": 1, "n": 1, "at": at, "slots": 8, "running": 4, "waiting": 1} | more))


def test_a_row_has_the_load_of_the_last_report() -> None:
    row = worker_row(member(), report(blocks_total=200, blocks_used=50, step_s=0.02, step_decodes=4, tiers=[9, 1, 0]), 100.5)
    assert (row.state, row.running, row.slots, row.waiting) == ("serving", 4, 8, 1)
    assert (row.kv_used, row.tokens_s, row.step_s, row.report_age_s) == (0.25, 200.0, 0.02, 0.5)
    assert row.tiers == [9, 1, 0]


def test_an_idle_worker_makes_no_tokens_whatever_its_last_step_was() -> None:
    assert worker_row(member(), report(running=0, step_s=0.02, step_decodes=4), 100.0).tokens_s == 0.0


def test_a_worker_whose_reports_stopped_is_named() -> None:
    assert worker_row(member(), report(), 100.0 + STALE_S).state == "serving"
    assert worker_row(member(), report(), 100.1 + STALE_S).state == "no report"
    assert worker_row(member(), None, 100.0).state == "no report"


@pytest.mark.parametrize(
    ("lease", "state"),
    [
        ({"draining": True}, "draining"),
        ({"draining": True, "sleeping": 1}, "asleep"),
        ({"draining": True, "sleeping": 1, "waking": True}, "waking"),
        ({"draining": True, "paused": True}, "paused"),
    ],
)
def test_a_worker_that_takes_no_requests_says_why(lease: dict[str, Any], state: str) -> None:
    assert worker_row(member(**lease), report(), 100.0).state == state
