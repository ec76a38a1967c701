"""Derives from an engine's speed how many requests a second a worker takes within its targets, and how many workers it needs.

A worker that decodes `k` sequences at once computes prompts in the same steps. With `s` seconds for a step of `k` sequences,
`o` tokens of output and `p` seconds for a prompt, Little's law gives the rate `k / (o·s + k·p)` at full load; the largest `k`
whose time between tokens meets the target is used. Workers that only prefill can take `1 / p`.

Requests wait in one queue for all workers, so the wait is that of M/M/N (Erlang's C), with `1 / rate` as the time of service.
Where the computation of the prompt alone takes longer than the target, no number of workers meets it: the count is then what
the load needs, and the plan says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp

import msgspec

from headrace.planner.speed_curve import Speed

FULL = 0.95  # of its capacity that a worker is planned to be used, whatever the targets are
LEAST_SLACK = 0.25  # of the target that is left for waiting where the prompt takes all of it
MOST_SEQUENCES = 4096


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """Times to be met: to the first token, between tokens, and the share of requests that may miss them."""

    ttft_s: float = 2.0
    itl_s: float = 0.05
    miss: float = 0.01


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Requests as they come: mean tokens of prompt, of those to compute, and of output; `long`: a long one's to compute."""

    prompt: float
    uncached: float
    output: float
    long: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The load that one worker can take. `reachable` False: the target is missed however many workers there are."""

    per_s: float  # requests
    sequences: int = 1  # at once
    slack_s: float = 0.0  # that a request may wait
    reachable: bool = True


def prefill_capacity(speed: Speed, shape: Shape, targets: Targets) -> Capacity:
    """Return the capacity of a worker that only computes prompts."""
    own_s = speed.base_s + shape.uncached * speed.prefill_s
    return _within(targets, per_s=1.0 / own_s, sequences=1, long_s=speed.base_s + shape.long * speed.prefill_s)


def decode_capacity(speed: Speed, shape: Shape, targets: Targets, *, slots: int, kv_tokens: int) -> Capacity:
    """Return the capacity of a worker that decodes what others have prefilled."""
    return _serving(speed, shape, targets, slots=slots, kv_tokens=kv_tokens, prompt_s=0.0, long_s=speed.base_s)


def aggregated_capacity(speed: Speed, shape: Shape, targets: Targets, *, slots: int, kv_tokens: int) -> Capacity:
    """Return the capacity of a worker that does both."""
    prompt_s, long_s = shape.uncached * speed.prefill_s, speed.base_s + shape.long * speed.prefill_s
    return _serving(speed, shape, targets, slots=slots, kv_tokens=kv_tokens, prompt_s=prompt_s, long_s=long_s)


def _serving(
    speed: Speed, shape: Shape, targets: Targets, *, slots: int, kv_tokens: int, prompt_s: float, long_s: float
) -> Capacity:
    context = shape.prompt + shape.output / 2
    output = max(1.0, shape.output)
    most = max(1, min(slots or MOST_SEQUENCES, int(kv_tokens / max(1.0, context)) if kv_tokens else MOST_SEQUENCES))

    def rate_of(sequences: int) -> float:
        return sequences / (output * speed.step_s(sequences, context) + sequences * prompt_s)

    def meets(sequences: int) -> bool:
        share = 1.0 - min(0.99, rate_of(sequences) * prompt_s)
        return speed.step_s(sequences, context) / share <= targets.itl_s

    low, high = 1, most  # more sequences never make steps shorter
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if meets(middle) else (low, middle - 1)
    found = _within(targets, per_s=rate_of(low), sequences=low, long_s=long_s)
    if not meets(1):
        return Capacity(per_s=rate_of(most), sequences=most, slack_s=found.slack_s, reachable=False)
    return found


def _within(targets: Targets, *, per_s: float, sequences: int, long_s: float) -> Capacity:
    slack_s = targets.ttft_s - long_s
    least_s = LEAST_SLACK * targets.ttft_s
    return Capacity(per_s=per_s, sequences=sequences, slack_s=max(slack_s, least_s), reachable=slack_s > 0)


def late_share(workers: int, rate: float, capacity: Capacity) -> float:
    """Return the share of requests that wait longer than they may, 1 for workers that cannot keep up."""
    offered = rate / capacity.per_s
    if workers <= offered:
        return 1.0 if rate > 0 else 0.0
    blocked = 1.0  # Erlang's B, by its recursion
    for n in range(1, workers + 1):
        blocked = offered * blocked / (n + offered * blocked)
    waits = blocked / (1.0 - offered / workers * (1.0 - blocked))
    return min(1.0, waits * exp(-(workers - offered) * capacity.per_s * capacity.slack_s))


def workers_for(rate: float, capacity: Capacity, targets: Targets, *, most: int) -> int:
    """Return the least number of workers that take this rate within the targets: 0 for none, at most `most`."""
    if not rate > 0:
        return 0
    least = max(1, ceil(rate / (FULL * capacity.per_s)))
    for workers in range(min(least, most), most):
        if late_share(workers, rate, capacity) <= targets.miss:
            return workers
    return most
