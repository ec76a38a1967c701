"""Vectors as they come from workers: f32, little endian."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

from headrace.broker.codec import unpack_f32
from headrace.frontend.errors import FrontendError


class BadVector(FrontendError, status=502, code="engine_error", retriable=True):
    """The engine gave a vector that has no meaning."""


def floats(vector: bytes) -> list[float]:
    """Raises BadVector for one that is empty, cut, or not finite: JSON has no words for that."""
    if not vector or len(vector) % 4:
        raise BadVector(f"the engine gave a vector of {len(vector)} bytes")
    numbers = unpack_f32(vector)
    if not math.isfinite(sum(numbers)):
        raise BadVector("the engine gave a vector with numbers that are not finite")
    return numbers


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """0 where one of them has no direction."""
    length = math.sqrt(sum(map(mul, a, a))) * math.sqrt(sum(map(mul, b, b)))
    return sum(map(mul, a, b)) / length if length else 0.0
