"""Counts what a piece of code leaves to the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Callable


def left_to_the_collector(run: Callable[[], object]) -> int:
    """Return how many unreachable objects `run` leaves that hold each other: what is freed at once does not count."""
    gc.collect()
    gc.disable()
    try:
        run()
        return gc.collect()
    finally:
        gc.enable()
