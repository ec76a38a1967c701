"""Targets of a request: the time to first token and the time between tokens that its client asks for."""

from __future__ import annotations

from math import isnan
from typing import NamedTuple

MOST_TARGET_S = 1e6  # a longer one is none


class Targets(NamedTuple):
    """Targets in seconds. 0 is a target as any other: it is always missed, so the request goes where it is least late."""

    ttft_s: float
    itl_s: float


def target_of(asked_s: float | None, default_s: float) -> float:
    """Return a target in seconds: what was asked, clamped to what can be, else the default. NaN asks for nothing."""
    if asked_s is None or isnan(asked_s):
        return default_s
    return min(max(asked_s, 0.0), MOST_TARGET_S)
