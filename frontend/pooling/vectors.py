"""Decodes the vectors of workers: f32, little endian."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

from headrace.broker.codec import unpack_f32
from headrace.frontend.errors import FrontendError


class BadVector(FrontendError, status=502, code="engine_error", retriable=True):
    """The engine gave a vector that has no meaning."""


def floats(vector: bytes) -> list[float]:
    """Return the numbers of a vector. Raises BadVector if it is empty, truncated or not finite, which JSON cannot express."""
    if not vector or len(vector) % 4:
        raise BadVector(f"the engine gave a vector of {len(vector)} bytes")
    numbers = unpack_f32(vector)
    if not math.isfinite(sum(numbers)):
        raise BadVector("the engine gave a vector with numbers that are not finite")
    return numbers


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the cosine of two vectors; 0 if one of them is zero."""
    length = math.sqrt(sum(map(mul, a, a))) * math.sqrt(sum(map(mul, b, b)))
    return sum(map(mul, a, b)) / length if length else 0.0
