"""Makes observations for tests of the planner."""

from __future__ import annotations

from typing import Any

from headrace.planner.capacity import Speed
from headrace.planner.observe import Observation, RequestSight, WorkerSight

BEGAN = 1_700_000_000.0
SPEED = Speed(base_s=0.01, prefill_s=1e-4, decode_s=2e-4, context_s=0.0)
PROFILE = {"aggregated": SPEED, "prefill": SPEED, "decode": SPEED}
SOME = tuple(RequestSight(prompt=1000, uncached=1000) for _ in range(10))


def worker(name: str, role: str = "aggregated", **kw: Any) -> WorkerSight:
    """Return a worker that has just reported."""
    return WorkerSight(worker=name, role=role, **{"slots": 32, "report_age_s": 0.1, **kw})


def seen(at: float, *workers: WorkerSight, **kw: Any) -> Observation:
    """Return an observation `at` seconds after the beginning."""
    values: dict[str, Any] = {"arrived": 0, "waiting": 0, **kw}
    return Observation(at=BEGAN + at, model="m", pool="p", workers=workers, **values)
