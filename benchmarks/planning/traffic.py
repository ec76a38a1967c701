"""Makes the traffic for comparisons of planners: a recorded hour as it is or stretched, and waves."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from math import pi, sin
from pathlib import Path

from headrace.planner.replay import Request, from_start, read_trace

BLOCK = 512  # tokens of a block of Mooncake's traces


def stretched(
    trace: Sequence[Request],
    *,
    minutes: tuple[float, float] = (0.0, 25.0),
    factor: int = 12,
    moved_s: float = 20.0,
    seed: int = 1,
) -> list[Request]:
    """Return a part of a trace, between two `minutes`, `factor` times as long with `factor` requests for each.

    Each is moved by up to `moved_s` seconds of the trace's own time before it is stretched, so that they are no copies: bursts
    grow longer and softer.
    """
    rng = random.Random(seed)
    rows = [
        ((one.at + rng.uniform(-moved_s, moved_s)) * factor, one.prompt, one.uncached, one.output)
        for one in trace
        if minutes[0] * 60.0 <= one.at < minutes[1] * 60.0
        for _ in range(factor)
    ]
    return from_start(rows)


def read(path: Path) -> list[Request]:
    """Return a trace: a CSV file of the Azure traces' form, or lines of JSON of Mooncake's.

    The latter tell which blocks of prompts are alike: what no earlier prompt began with is to be computed.
    """
    if path.suffix != ".jsonl":
        return read_trace(path)
    seen: set[int] = set()
    rows = []
    for line in path.read_text().splitlines():
        one = json.loads(line)
        blocks, prompt = one["hash_ids"], one["input_length"]
        known = next((n for n, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
        rows.append((one["timestamp"] / 1000.0, prompt, max(1, prompt - known * BLOCK), one["output_length"]))
    return from_start(rows)


def waves(hours: float, *, period_s: float, peak: float, seed: int = 1) -> list[Request]:
    """Return Poisson arrivals whose rate goes up and down between almost none and `peak` a second."""
    rng, rows, at = random.Random(seed), [], 0.0
    while at < hours * 3600.0:
        at += rng.expovariate(peak)
        if rng.random() < 0.03 + 0.97 * (0.5 - 0.5 * sin(2.0 * pi * at / period_s + pi / 2.0)):
            prompt = min(8000, int(rng.lognormvariate(6.5, 0.8)))
            rows.append((at, prompt, prompt, rng.randrange(1, 40)))
    return from_start(rows)


def rates(requests: Sequence[Request], step_s: float) -> list[float]:
    """Return the requests a second of each step."""
    counts = [0] * (int(requests[-1].at / step_s) + 1)
    for one in requests:
        counts[int(one.at / step_s)] += 1
    return [count / step_s for count in counts]
