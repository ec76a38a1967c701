"""Vectors that the simulator computes for an input, as a pure function of its token ids.

Every token id stands for a direction, drawn from its number. An embedding is the sum of the directions of all tokens, a token
that occurs more often weighing more.  So texts that share tokens are more alike than texts that do not, and the order of tokens
does not matter.  Special tokens stand in every text and count for nothing.  Scores and classes are computed from embeddings.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

_STEEPNESS = 6.0  # logits between a likeness of 1 and one of 0
_MIDDLE = 0.35  # the likeness of a pair whose score is 1/2

Vector = NDArray[np.float64]


def embedding(ids: Sequence[int], size: int, *, special: Collection[int] = ()) -> Vector:
    """Add up the directions of these tokens. The result is never all zero."""
    counted = [token for token in ids if token not in special] or list(ids)
    tokens, counts = np.unique(np.asarray(counted, dtype=np.uint64), return_counts=True)
    vector: Vector = (1.0 + np.log(counts)) @ _directions(tokens, size)
    return vector if np.any(vector) else _directions(tokens[:1], size)[0]


def unit(vector: Vector) -> Vector:
    """Scale a vector to length 1."""
    return vector / np.linalg.norm(vector)


def pair_logit(ids: Sequence[int], second: int, size: int, *, special: Collection[int] = ()) -> float:
    """Score how well the text from `second` on fits the text before it."""
    likeness = unit(embedding(ids[:second], size, special=special)) @ unit(embedding(ids[second:], size, special=special))
    return _STEEPNESS * (float(likeness) - _MIDDLE)


def class_logits(ids: Sequence[int], classes: int, size: int, *, special: Collection[int] = ()) -> Vector:
    """Score the text against the direction of each class; one number per class."""
    numbers = np.arange(1, classes + 1, dtype=np.uint64) << np.uint64(40)  # no token has such a number
    return _STEEPNESS * (_unit_rows(_directions(numbers, size)) @ unit(embedding(ids, size, special=special)))


def softmax(logits: Vector) -> Vector:
    """Turn logits into probabilities."""
    powers = np.exp(logits - logits.max())
    total: Vector = powers / powers.sum()
    return total


def sigmoid(logit: float) -> float:
    """Turn a logit into a probability."""
    return float(1.0 / (1.0 + np.exp(-logit)))


def _unit_rows(rows: Vector) -> Vector:
    scaled: Vector = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return scaled


def _directions(numbers: NDArray[np.uint64], size: int) -> Vector:
    """Draw a row per number, with entries between -1 and 1: splitmix64 of the number and the place."""
    with np.errstate(over="ignore"):
        places = np.arange(1, size + 1, dtype=np.uint64)
        mixed = (numbers[:, None] * np.uint64(0xD1342543DE82EF95) + places[None, :]) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(np.float64) / float(1 << 52) - 1.0
