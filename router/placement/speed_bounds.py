"""Bounds for what a few samples say of a worker's speed.

A coefficient of the model of step times (`calibration.py`) is used as learnt only within a factor of what it is compared with.
The factor is 1 without samples and doubles with every `DOUBLING` samples that the coefficient took part in. So a handful of
noisy steps cannot make a worker many times cheaper than its neighbours, and one that is really 20 times as fast is judged so
after 12 × log2(20), about 52 steps. In between it is judged as near to the truth as the factor allows.
"""

from __future__ import annotations

from collections.abc import Sequence

Vector = tuple[float, float, float]  # seconds of a step, of a prefill token, of a decoding sequence
Counts = tuple[int, int, int]  # samples that each of them took part in

DOUBLING = 12  # samples
OPEN_SAMPLES = 120  # from here on, a factor of 1000, a bound is as good as none


_MOST = 1000  # samples; more allow no more
_REACH = [float(2.0 ** (samples / DOUBLING)) for samples in range(_MOST + 1)]


def reach(samples: int) -> float:
    """Return the factor by which a coefficient of so many samples may differ from what it is compared with."""
    return _REACH[min(_MOST, samples)]


def bounded(own: Vector, others: Vector, counts: Counts) -> Vector:
    """Return the coefficients of a worker, each no further from that of the others than its samples reach."""
    if min(counts) >= OPEN_SAMPLES:
        return own
    kept = []
    for value, other, count in zip(own, others, counts, strict=True):
        factor = reach(count)
        kept.append(min(max(value, other / factor), other * factor))
    return kept[0], kept[1], kept[2]


def weighted_mean(known: Sequence[tuple[Vector, Counts]], most: float) -> Vector:
    """Return the mean of the coefficients, each weighted by its samples, of which at most `most` count.

    Of a coefficient that no sample took part in, the plain mean. `known` is not empty.
    """
    first, second, third = (_mean_of([(values[i], min(counts[i], most)) for values, counts in known]) for i in range(3))
    return first, second, third


def _mean_of(pairs: list[tuple[float, float]]) -> float:
    total = sum(weight for _, weight in pairs)
    if not total:
        return sum(value for value, _ in pairs) / len(pairs)
    return sum(value * weight for value, weight in pairs) / total
