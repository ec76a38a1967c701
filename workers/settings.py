"""Settings of one worker process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_LABEL = 64  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker runs and how. Durations in seconds."""

    engine: str = "sim"
    model: str = ""  # folder or hub id; empty = the engine's bundled one
    served_name: str | None = None  # the name clients use; None = derived from the model
    namespace: str = "default"
    role: str = "aggregated"
    worker_name: str | None = None  # a stable name; the process start is appended. None = random
    drain_grace_s: float = 60.0
    start_timeout_s: float = 900.0  # loading a large model takes minutes
    stall_s: float = 120.0  # the engine has work and reports nothing for so long: it is dead
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    metrics_port: int | None = None  # None = no metrics endpoint, 0 = any free port
    separate_frames: bool = False  # token frames on a connection of their own: measured slower, docs/performance.md
    labels: Sequence[str] = ()  # what requests may ask for: zone, rack, kind of GPU, …

    def __post_init__(self) -> None:
        for label in self.labels:
            if not label.strip() or len(label) > MOST_LABEL or "," in label:
                raise ValueError(f"label {label!r}: 1 to {MOST_LABEL} characters, no comma")
