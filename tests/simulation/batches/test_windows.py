"""Batches that share a pool meet their deadlines, because what is due first runs first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from headrace.broker.batches import batch_run, results
from headrace.broker.batches.record import BatchRecord
from headrace.broker.durable.held_job import HeldJob
from headrace.broker.durable.intake import WaitingJobs
from tests.simulation.batches.windows import BatchWindows
from tests.simulation.virtual.network import CALM
from tests.simulation.virtual.world import World

LONGEST_S = 6 * 3600.0


def ends(**options: Any) -> dict[str, BatchRecord]:
    with World(1, CALM) as world:
        deployment = BatchWindows(world, **options)
        deployment.build()
        world.run(10.0)
        assert world.run(LONGEST_S, stop=lambda: deployment.over, every_s=30.0)
        return deployment.records()


@pytest.fixture(autouse=True)
def _look_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "LOOK_S", 10.0)


def take_in_order_of_arrival(self: WaitingJobs, _started: Mapping[str, int]) -> HeldJob | None:
    first = min(self._by_seq, default=None)
    if first is None:
        return None
    held = self._by_seq[first]
    self.remove(held)
    return held


def oldest_first(records: Iterable[BatchRecord], window: int, _now: float) -> dict[str, int]:
    given, left = {}, window
    for record in sorted(records, key=lambda one: (one.created, one.expires_at)):
        given[record.id] = min(left, record.counts.open)
        left -= given[record.id]
    return given


def test_three_batches_with_windows_of_30_minutes_2_hours_and_a_day_all_meet_their_deadlines() -> None:
    records = ends()
    assert {window: record.status for window, record in records.items()} == dict.fromkeys(("24h", "2h", "30m"), "completed")
    for record in records.values():
        assert record.completed_at is not None
        assert record.completed_at <= record.expires_at
    order = sorted(records, key=lambda window: records[window].completed_at or 0)
    assert order == ["30m", "2h", "24h"]


def test_in_order_of_arrival_the_batch_with_the_shortest_window_would_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "shares", oldest_first)
    monkeypatch.setattr(WaitingJobs, "take", take_in_order_of_arrival)
    assert ends()["30m"].status == "expired"


def test_with_many_more_lines_out_than_slots_the_batch_with_the_shortest_window_would_expire() -> None:
    assert ends(slots=None)["30m"].status == "expired"
