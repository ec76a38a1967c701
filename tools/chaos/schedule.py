"""Draws the schedule of faults from a seed: the same seed and kinds give the same faults."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Act = Literal["kill", "freeze", "drain", "restart", "cut", "slow", "stutter", "repeat"]
Part = Literal["worker", "prefill", "router", "routers", "frontend", "nats", "requests"]

# A kind is a part and an act; its weight is its relative frequency.
KINDS: dict[str, float] = {
    "worker kill": 4,
    "worker freeze": 3,
    "worker drain": 2,
    "worker cut": 3,  # The worker's link to the NATS server carries nothing for a while.
    "worker slow": 2,  # The worker's link delays everything, so that its lease is refreshed on an old clock.
    "prefill kill": 3,
    "prefill freeze": 2,
    "prefill drain": 1,
    "prefill cut": 1,
    "router kill": 2,
    "router freeze": 2,
    "router drain": 1,
    "router cut": 1,
    "router slow": 1,
    "routers kill": 1,  # all routers at once
    "frontend kill": 1,
    "frontend freeze": 1,
    "frontend drain": 1,
    "frontend cut": 1,
    "nats restart": 2,  # killed, and started again
    "nats freeze": 1,
    "nats stutter": 1,  # The server stops again and again, as a server does that waits for its disk.
    "requests repeat": 2,  # messages with requests are stored twice
}
_DURATION_S = {
    "freeze": (0.5, 8.0),
    "restart": (1.0, 10.0),
    "cut": (0.5, 12.0),
    "slow": (3.0, 8.0),
    "stutter": (2.0, 6.0),
    "repeat": (1.0, 3.0),
}
_LONGEST_NATS_FREEZE_S = 4.0
_SECOND_AT_ONCE = 0.2  # share of faults that are injected while the last one is still being mended


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault of the schedule. `pick` chooses among the possible victims. `gap_s` is the time before the fault.

    `duration_s`: the length of a fault that lasts. `settled`: the fault is injected only after the deployment is well again,
    not while the last fault is being mended.
    """

    kind: str
    pick: int
    duration_s: float
    gap_s: float
    settled: bool

    @property
    def part(self) -> str:
        return self.kind.partition(" ")[0]

    @property
    def act(self) -> str:
        return self.kind.partition(" ")[2]


def kinds_of(mode: str) -> list[str]:
    """Return the kinds possible in `mode`. Prefill workers exist in the mode `disagg` only."""
    return [kind for kind in KINDS if mode == "disagg" or not kind.startswith("prefill")]


def draw_faults(seed: int, kinds: Sequence[str]) -> Iterator[PlannedFault]:
    """Draw faults without end. Each kind comes once, in random order, before any comes twice."""
    rng = random.Random(f"faults {seed}")  # noqa: S311  # a schedule, not a secret
    first = rng.sample(list(kinds), len(kinds))
    while True:
        kind = first.pop() if first else rng.choices(list(kinds), [KINDS[kind] for kind in kinds])[0]
        least, most = _DURATION_S.get(kind.partition(" ")[2], (0.0, 0.0))
        if kind == "nats freeze":
            most = _LONGEST_NATS_FREEZE_S
        yield PlannedFault(
            kind=kind,
            pick=rng.getrandbits(16),
            duration_s=round(rng.uniform(least, most), 2),
            gap_s=round(rng.uniform(1.0, 4.0), 2),
            settled=rng.random() >= _SECOND_AT_ONCE,
        )
