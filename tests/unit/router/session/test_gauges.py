"""The gauges of a session show its window's age."""

from __future__ import annotations

from typing import Any, cast

from headrace.router.session import metrics
from headrace.router.session.gauges import AGE_EVERY_S, SessionGauges


class Scheduler:
    def queued_prefill_tokens(self, now_s: float) -> int:
        return 7


class Window:
    looks = 0

    def oldest_s(self, wall_s: float) -> float:
        self.looks += 1
        return wall_s - 95.0


def test_the_oldest_request_is_looked_for_once_a_second() -> None:
    window = Window()
    gauges = SessionGauges("a pool", cast("Any", Scheduler()), None, cast("Any", window), wall=lambda: 100.0)
    for tick in range(10):
        gauges.refresh(50.0 + tick / 10)
    assert window.looks == 1
    gauges.refresh(50.0 + AGE_EVERY_S)
    assert window.looks == 2
    assert metrics.OLDEST_S.labels("a pool")._value.get() == 5.0
    assert metrics.PREFILL_QUEUE.labels("a pool")._value.get() == 7
