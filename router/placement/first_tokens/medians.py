"""Learns by what factor predictions are off, as running medians of measured over predicted seconds. Sans-io.

The median is followed in steps of bounded size, so that one request that took a hundred times as long moves it no further than
one that took twice as long.
"""

from __future__ import annotations

from math import exp, inf, log
from typing import NamedTuple

GAIN = 0.03  # the longest step of a median, in the logarithm
FIRST_GAIN = 0.7  # of the first step; the nth has this over n, until that is below GAIN
MOST_FACTOR = 4.0  # learnt, either way
SIZES = 4.0  # each class of prompt lengths is that many times as long as the one before
_MOST_LOG = log(MOST_FACTOR)


class Bucket(NamedTuple):
    """Requests whose predictions are off alike. `state`: cold, idle, decoding, filling or remote."""

    fleet: str
    size: int
    state: str


def bucket_of(fleet: str, tokens: float, state: str) -> Bucket:
    """Return the bucket of a prompt by its uncached tokens."""
    return Bucket(fleet, int(log(max(tokens, 1.0), SIZES)), state)


class Medians:
    """The running median of measured over predicted seconds in each bucket, as a factor."""

    def __init__(self) -> None:
        self._logs: dict[Bucket, float] = {}
        self._counts: dict[Bucket, int] = {}

    def factor(self, bucket: Bucket) -> float:
        """Return what a prediction in this bucket is multiplied with; 1 while nothing is known."""
        return exp(self._logs.get(bucket, 0.0))

    def observe(self, bucket: Bucket, *, predicted_s: float, measured_s: float) -> None:
        """Learn from a request. Times that are not above zero and finite are ignored."""
        if not (0.0 < predicted_s < inf and 0.0 < measured_s < inf):
            return
        count = self._counts[bucket] = self._counts.get(bucket, 0) + 1
        gain = max(FIRST_GAIN / count, GAIN)
        now = self._logs.get(bucket, 0.0)
        now += min(max(log(measured_s) - log(predicted_s) - now, -gain), gain)
        self._logs[bucket] = min(max(now, -_MOST_LOG), _MOST_LOG)
