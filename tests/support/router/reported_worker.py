"""A worker whose load is as a test says."""

from __future__ import annotations

from typing import Any

from headrace.broker.messages.events import LoadReport
from headrace.router.placement.calibration import SpeedEstimate
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.types import WorkerInfo

SPEED = SpeedEstimate(0.01, 10_000.0, 0.001)


def loads(**report: Any) -> tuple[LoadTable, WorkerLoad]:
    """Return a pool with one worker, whose report came at 0."""
    table = LoadTable()
    table.put(WorkerInfo(worker="w", slots=8, step_tokens=8192), SPEED)
    load = table.get("w")
    assert load is not None
    if report:
        values: dict[str, Any] = {"slots": 8, "waiting": 0, **report}
        load.on_report(LoadReport(worker="w", epoch=1, n=1, at=0.0, **values), 0.0)
    return table, load
