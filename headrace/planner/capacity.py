"""Capacity of workers: the requests per second that one takes within the targets, and the number of workers that a load needs.

A worker that decodes `k` sequences at once computes prompts in the same steps. With `s` seconds for a step of `k` sequences,
`o` tokens of output and `p` seconds for a prompt, Little's law gives the rate `k / (o·s + k·p)` at full load; the largest `k`
whose time between tokens meets the target is used. Workers that only prefill can take `1 / p`.

Requests wait in one queue for all workers, so the wait is that of M/M/N (Erlang's C), with `1 / rate` as the time of service.
Where the computation of the prompt alone takes longer than the target, no number of workers meets it: the count is then what
the load needs, and the plan says so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, exp

import msgspec

from headrace.planner.forecast import Forecast
from headrace.planner.observe import OutcomeSight
from headrace.planner.plan import Reason

FULL = 0.95  # of its capacity that a worker is planned to be used, whatever the targets are
LEAST_SLACK = 0.25  # of the target that is left for waiting where the prompt takes all of it
MOST_SEQUENCES = 4096
ENOUGH = 0.85  # of a worker: while less is required, batch work sleeps if nothing else needs a worker
HARDLY_ANY = 1.0  # request that is expected within the horizon: with less a pool without workers stays so


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of an engine step, of a prefill token, of a decoding sequence, and of a token of context in one of them."""

    base_s: float = 0.01
    prefill_s: float = 1e-4
    decode_s: float = 2e-4
    context_s: float = 1e-8

    def step_s(self, sequences: float, context: float) -> float:
        """Return the time of a step that only decodes. `context`: tokens of each sequence."""
        return self.base_s + sequences * (self.decode_s + context * self.context_s)

    def took_s(self, prefill: int, sequences: int, context: int) -> float:
        """Return the time of a step. `context`: tokens of all sequences."""
        return self.base_s + prefill * self.prefill_s + sequences * self.decode_s + context * self.context_s


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """Times to be met: to the first token, between tokens, and the share of requests that may miss them."""

    ttft_s: float = 2.0
    itl_s: float = 0.05
    miss: float = 0.01

    def missed(self, ended: Iterable[OutcomeSight]) -> int:
        return sum(one.ttft_s > self.ttft_s or one.itl_s > self.itl_s for one in ended)


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


def capacity_of(role: str, speed: Speed, shape: Shape, targets: Targets, *, slots: int = 0, kv_tokens: int = 0) -> Capacity:
    """Return the capacity of a worker: only of prompts, only of decoding what others have prefilled, or of both."""
    prompt_s = 0.0 if role == "decode" else shape.uncached * speed.prefill_s
    slack_s = targets.ttft_s - (speed.base_s if role == "decode" else speed.base_s + shape.long * speed.prefill_s)
    least_s, reachable = max(slack_s, LEAST_SLACK * targets.ttft_s), slack_s > 0
    if role == "prefill":
        return Capacity(per_s=1.0 / (speed.base_s + prompt_s), slack_s=least_s, reachable=reachable)
    context = shape.prompt + shape.output / 2
    output = max(1.0, shape.output)
    most = max(1, min(slots or MOST_SEQUENCES, int(kv_tokens / max(1.0, context)) if kv_tokens else MOST_SEQUENCES))

    def rate_of(sequences: int) -> float:
        return sequences / (output * speed.step_s(sequences, context) + sequences * prompt_s)

    def late(sequences: int) -> bool:
        share = 1.0 - min(0.99, rate_of(sequences) * prompt_s)
        return speed.step_s(sequences, context) / share > targets.itl_s

    sequences = bisect_left(range(1, most + 1), True, key=late)  # more sequences never make steps shorter
    if not sequences:
        sequences, reachable = most, False
    return Capacity(per_s=rate_of(sequences), sequences=sequences, slack_s=least_s, reachable=reachable)


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
    return next((n for n in range(least, most) if late_share(n, rate, capacity) <= targets.miss), most)


def batch_workers(backlog: Iterable[tuple[float, int]], *, per_s: float, start_s: float, awake: bool) -> int:
    """Return the workers that batch work and its deadlines need: the maximum over t of B(t) / (R · (t - C)).

    `B(t)`: requests due within `t` seconds, waiting, claimed and running ones alike; `R`: requests a second of a worker; `C`:
    the seconds that a worker takes to start. What is due before it could counts as due right then. A pool without a worker
    (`awake` False) sleeps until the work is worth a start.
    """
    due, required = 0, 0.0
    for left_s, count in sorted(backlog):
        due += max(0, count)
        required = max(required, due / (per_s * max(left_s - start_s, 1.0)))
    return 0 if not awake and required < ENOUGH else ceil(required - 1e-9)


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a pool: `rate` a second lately, `forecast`, `waiting` requests, their late waits, and batch work."""

    rate: float
    forecast: Forecast | None
    waiting: int
    wait_s: float | None  # 95 % quantile of the waits lately
    backlog: tuple[tuple[float, int], ...] = ()
    idle: bool = False  # nothing has arrived for long
    start_s: float = 60.0
    kept: float = 0.0  # load that workers are kept for whatever is forecast, 0 = none


class Need(msgspec.Struct, frozen=True):
    workers: int
    reason: Reason


def need_of(demand: Demand, capacity: Capacity, targets: Targets, *, supply: int, ready: int, most: int) -> Need:
    """Return the need by known speeds. `supply`: workers that serve or are on their way, `ready`: those that serve."""
    expected = demand.forecast.value if demand.forecast is not None else demand.rate
    high = max(demand.forecast.high if demand.forecast is not None else 0.0, demand.rate)
    if demand.kept:
        high = min(high, max(demand.kept, demand.rate))
    if demand.idle and not demand.waiting and expected * demand.start_s < HARDLY_ANY:
        needs = [Need(0, "idle")]
    else:
        needs = [Need(max(1, workers_for(high, capacity, targets, most=most + 1)), "forecast")]
        needs.append(Need(workers_for(demand.kept, capacity, targets, most=most + 1), "peak_kept"))
    batch = batch_workers(demand.backlog, per_s=capacity.per_s, start_s=demand.start_s, awake=supply > 0)
    needs.append(Need(batch, "batch_deadline"))
    if demand.waiting and not supply:
        needs.insert(0, Need(1, "from_zero"))
    if demand.waiting > max(1, ready) * capacity.per_s * capacity.slack_s:  # some of them will have waited too long
        clear_s = max(demand.start_s, targets.ttft_s)
        needs.append(Need(ceil((demand.rate + demand.waiting / clear_s) / (FULL * capacity.per_s)), "backlog"))
    late = demand.wait_s is not None and demand.wait_s > capacity.slack_s
    if late and supply == ready and needs[0].workers <= supply:
        needs.append(Need(supply + 1, "waits_late"))
    best = max(needs, key=lambda need: need.workers)
    return Need(min(best.workers, most + 1), best.reason)


def need_by_slots(demand: Demand, *, held: int, slots: int, supply: int, ready: int) -> Need:
    """Return the need while no speed is known: one more when the workers are full, none less."""
    if demand.waiting and not supply:
        return Need(1, "from_zero")
    if demand.idle and not held and not demand.waiting and not demand.backlog:
        return Need(0, "idle")
    if supply == ready and ready and demand.waiting and (not slots or held >= FULL * slots):
        return Need(supply + 1, "slots_full")
    return Need(max(1, supply), "steady")
