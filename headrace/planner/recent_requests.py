"""Keeps the shape of the last requests: lengths, and how long they waited before they were placed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import ceil

from headrace.planner.capacity import Shape
from headrace.planner.observation import Observation

KEPT = 500
FIRST_OUTPUT = 256.0  # tokens, while no answer has ended
LONG = 0.95


class RecentRequests:
    """The last requests of a pool, whatever they were: `shape` is None before the first."""

    def __init__(self) -> None:
        self._lengths: deque[tuple[int, int]] = deque(maxlen=KEPT)
        self._outputs: deque[int] = deque(maxlen=KEPT)
        self._waits: deque[tuple[float, float]] = deque(maxlen=KEPT)

    def note(self, seen: Observation) -> None:
        """Take over what was placed and what has ended."""
        for one in seen.placed:
            if one.prompt >= 0 and one.uncached >= 0:
                self._lengths.append((one.prompt, min(one.uncached, one.prompt)))
                self._waits.append((seen.at, one.waited_s))
        self._outputs.extend(tokens for tokens in seen.outputs if tokens >= 0)

    @property
    def shape(self) -> Shape | None:
        """The shape of requests, None while none was seen."""
        if not self._lengths:
            return None
        uncached = sorted(one[1] for one in self._lengths)
        return Shape(
            prompt=sum(one[0] for one in self._lengths) / len(self._lengths),
            uncached=sum(uncached) / len(uncached),
            output=sum(self._outputs) / len(self._outputs) if self._outputs else FIRST_OUTPUT,
            long=float(uncached[min(len(uncached) - 1, ceil(LONG * len(uncached)) - 1)]),
        )

    def wait_s(self, share: float, *, since_s: float) -> float | None:
        """Return the quantile of the waits of requests placed since a time, None if there were too few to tell."""
        waits = sorted(wait for at, wait in self._waits if at >= since_s)
        return waits[min(len(waits) - 1, int(share * len(waits)))] if len(waits) >= 10 else None

    def dump(self) -> dict[str, object]:
        """Return what is stored."""
        return {"lengths": [list(one) for one in self._lengths], "outputs": list(self._outputs)}

    def load(self, lengths: Iterable[Sequence[int]], outputs: Iterable[int]) -> None:
        """Take stored ones over."""
        self._lengths.extend((int(one[0]), int(one[1])) for one in lengths)
        self._outputs.extend(int(one) for one in outputs)
