"""A profile of the simulator: its steps with their times and sizes, as a trace that browsers and Perfetto show."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.workers.errors import EngineError

if TYPE_CHECKING:
    from headrace.workers.sim.scheduler import StepResult

MOST_STEPS = 100_000  # kept of a long profile: the last ones
_numbers = itertools.count(1)


class StepTrace:
    """The steps since the profile was started, in the trace event format."""

    def __init__(self) -> None:
        self._steps: deque[dict[str, Any]] = deque(maxlen=MOST_STEPS)

    def add(self, began_s: float, ended_s: float, result: StepResult) -> None:
        """Record a step by the times of one clock."""
        self._steps.append(
            {
                "name": "step",
                "ph": "X",
                "pid": os.getpid(),
                "tid": 0,
                "ts": began_s * 1e6,
                "dur": (ended_s - began_s) * 1e6,
                "args": {"outputs": len(result.outputs), "modelled_s": result.duration_s},
            }
        )

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the trace into `folder`, which is made, under a name that is new. Raises EngineError if that fails."""
        path = folder / f"sim-{os.getpid()}-{int(time.time())}-{next(_numbers)}.trace.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode({"traceEvents": list(self._steps)}))
        except OSError as error:
            raise EngineError(f"the profile cannot be written to {path}: {error.strerror}") from error
        return {"file": str(path), "steps": len(self._steps)}
