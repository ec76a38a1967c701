"""Learns what an engine step costs, from load reports: prefill by tokens, decode by sequences and by their context.

    step_s ≈ base_s + prefill tokens × prefill_s + sequences × decode_s + context tokens × context_s

Least squares over samples that fade, each divided by its own step time so that short steps count as much as long ones, with a
pull towards a seed that is gone after a few dozen samples. None is below zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import msgspec
import numpy as np

FADING = 0.995  # of the weight of earlier samples with each new one
SEED_WEIGHT = 4.0  # samples
LEAST_SAMPLES = 20  # before the curve is believed without a seed
SWEEPS = 50


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of an engine step, of a prefill token, of a decoding sequence, and of a token of context in one of them."""

    base_s: float = 0.01
    prefill_s: float = 1e-4
    decode_s: float = 2e-4
    context_s: float = 1e-8

    def step_s(self, sequences: float, context: float) -> float:
        """Return the time of a step that only decodes. `context`: tokens of each sequence."""
        return self.base_s + sequences * (self.decode_s + context * self.context_s)


def _vector(speed: Speed) -> Any:
    return np.array([speed.base_s, speed.prefill_s, speed.decode_s, speed.context_s], dtype=float)


class SpeedCurve:
    """The curve of one (model, pool, role)."""

    def __init__(self, seed: Speed | None = None, *, fading: float = FADING) -> None:
        """`seed`: what a profile has measured; without one the curve is not `known` before it has seen enough.

        `fading`: what is left of the weight of earlier samples with each new one; 1 weighs all alike.
        """
        self._fading = fading
        self._seed = _vector(seed or Speed())
        self._seeded = seed is not None
        self._gram = np.zeros((4, 4))
        self._right = np.zeros(4)
        self.samples = 0

    @property
    def known(self) -> bool:
        """True once capacities can be derived from it."""
        return self._seeded or self.samples >= LEAST_SAMPLES

    def learn(self, step_s: float, *, prefill_tokens: float, decodes: float, context_tokens: float) -> bool:
        """Learn from a step. Returns False for one that says nothing: no work, or no finite time."""
        row = np.array([1.0, prefill_tokens, decodes, context_tokens], dtype=float)
        if not isfinite(step_s) or step_s <= 0 or not np.isfinite(row).all() or (row < 0).any():
            return False
        if prefill_tokens + decodes <= 0:
            return False
        row /= step_s
        self._gram = self._fading * self._gram + np.outer(row, row)
        self._right = self._fading * self._right + row
        self.samples += 1
        return True

    def speed(self) -> Speed:
        """Return the present estimate: all coefficients finite, none negative, the first three above zero."""
        weight = SEED_WEIGHT * max(0.0, 1.0 - self.samples / 50.0) + 0.02
        # unknowns are factors of the seed's values
        gram = self._gram * np.outer(self._seed, self._seed)
        right = self._right * self._seed
        gram = gram + weight * np.diag(np.maximum(1.0, 0.01 * np.diag(gram)))
        right = right + weight * np.maximum(1.0, 0.01 * np.diag(self._gram * np.outer(self._seed, self._seed)))
        found = np.ones(4)
        for _ in range(SWEEPS):  # projected Gauss-Seidel
            for i in range(4):
                rest = right[i] - gram[i] @ found + gram[i, i] * found[i]
                found[i] = max(0.0 if i == 3 else 1e-4, rest / gram[i, i])
        base_s, prefill_s, decode_s, context_s = (float(value) for value in found * self._seed)
        return Speed(base_s=base_s, prefill_s=prefill_s, decode_s=decode_s, context_s=context_s)

    def dump(self) -> dict[str, object]:
        """Return what is stored."""
        return {"gram": self._gram.ravel().tolist(), "right": self._right.tolist(), "samples": self.samples}

    def load(self, gram: Sequence[float], right: Sequence[float], samples: int) -> bool:
        """Take a stored curve over. Returns False for what is none."""
        if len(gram) != 16 or len(right) != 4 or not all(map(isfinite, (*gram, *right))):
            return False
        self._gram = np.array(gram, dtype=float).reshape(4, 4)
        self._right = np.array(right, dtype=float)
        self.samples = max(0, int(samples))
        return True
