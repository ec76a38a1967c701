"""Keeps what was learned over a restart: one way for all that learns."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np


class Learner:
    """Stores the attributes that `KEPT` names, each with its type as it is stored; None for those that are learners."""

    KEPT: ClassVar[Mapping[str, Any]] = {}

    def dump(self) -> dict[str, Any]:
        return {name: _stored(getattr(self, name)) for name in self.KEPT}

    def load(self, stored: Mapping[str, Any]) -> None:
        """Take stored attributes over. Raises ValueError, KeyError or msgspec's error for what is none."""
        for name, kind in self.KEPT.items():
            setattr(self, name, _recalled(getattr(self, name), stored[name], kind))


def _stored(value: Any) -> Any:
    match value:
        case Learner():
            return value.dump()
        case dict():
            return {name: _stored(one) for name, one in value.items()}
        case set():
            return sorted(value)
        case deque():
            return list(value)
        case np.ndarray():
            return value.tolist()
    return value


def _recalled(present: Any, stored: Any, kind: Any) -> Any:
    match present:
        case Learner():
            present.load(stored)
            return present
        case dict():
            return {name: _recalled(one, stored[name], kind) for name, one in present.items()}
    value = msgspec.convert(stored, kind)
    match present:
        case deque():
            return deque(value, maxlen=present.maxlen)
        case np.ndarray():
            array = np.array(value, dtype=float)
            if array.shape != present.shape or not np.isfinite(array).all():
                raise ValueError(f"{array.shape} is not the shape {present.shape}, or not all of it is finite")
            return array
    return value
