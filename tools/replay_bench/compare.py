"""Comparison of policies, side by side on one pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.tools.replay_bench.ceiling import Ceiling
from headrace.tools.replay_bench.classic import SWEEP, ClassicWeights
from headrace.tools.replay_bench.policies import CLASSIC, SWEPT, Policy
from headrace.tools.replay_bench.replay import (
    KNEE_PRECISION,
    Knee,
    Replay,
    ReplayPool,
    find_classic_knee,
    find_knee,
    replay,
    replay_classic,
)
from headrace.tools.replay_bench.report import Ceilings, KneeFound, Scenario, TimedRun
from headrace.tools.replay_bench.sequential import replay_sequential
from headrace.tools.replay_bench.shares import tenant_shares

ROUND_ROBIN = "round-robin"
AROUND_KNEE = (0.5, 0.8, 1.1)  # parts of the classic's knee at which all are compared


def _silent(_text: str) -> None:
    """Drop a line about progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Measures policies on a pool.

    `sweep`: the weights of `classic` that are tried, of which the best count. `progress` gets a line about each measurement.
    """

    pool: ReplayPool
    policies: Sequence[Policy]
    sweep: Sequence[ClassicWeights] = SWEEP
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    precision: float = KNEE_PRECISION  # of knees, relative
    progress: Callable[[str], None] = _silent

    def sequential(self) -> Scenario:
        """Replay one request after the other. `classic` has its default weights: there is no load that they could weigh."""
        limit = self.pool.ceiling()
        done = []
        for policy in self.policies:
            done.append(replay_sequential(self.pool, policy, limit=limit))
            self.progress(f"{policy.label}, one after the other: hit rate {done[-1].hit_rate:.4f}")
        return self._scenario(limit, sequential=done)

    def in_time(self, rates: Sequence[float]) -> Scenario:
        """Replay every policy at every rate, `classic` at each with the weights that are best there."""
        limit = self.pool.ceiling()
        return self._scenario(limit, runs=[self._run(p, rate, limit) for rate in rates for p in self.policies])

    def knees(self) -> Scenario:
        """Find the sustainable load of every policy, then replay all of them at parts of that of `classic`.

        The weights of `classic` stay those of its knee.
        """
        limit = self.pool.ceiling()
        found = [(policy, self._knee(policy, limit)) for policy in self.policies]
        rates = {policy.name: knee.rate for policy, knee in found if knee is not None}
        classic = rates.get(CLASSIC)
        around: list[TimedRun] = []
        if classic is not None:
            best = [policy if knee is None else knee.policy for policy, knee in found]
            around = [self._timed(replay(self.pool, p, rate=part * classic, limit=limit)) for part in AROUND_KNEE for p in best]
        return self._scenario(
            limit,
            knees=[self._found(policy, knee, classic, rates.get(ROUND_ROBIN)) for policy, knee in found],
            around_knee=around,
        )

    def _knee(self, policy: Policy, limit: Ceiling) -> Knee | None:
        if policy.name in SWEPT:
            knee = find_classic_knee(self.pool, policy, limit=limit, sweep=self.sweep, precision=self.precision)
        else:
            knee = find_knee(self.pool, policy, limit=limit, precision=self.precision)
        self.progress(f"{policy.name}: no knee" if knee is None else f"{knee.policy.label}: knee at rate {knee.rate:.3f}")
        return knee

    def _run(self, policy: Policy, rate: float, limit: Ceiling) -> TimedRun:
        if policy.name in SWEPT:
            done = replay_classic(self.pool, policy, rate=rate, limit=limit, sweep=self.sweep)
        else:
            done = replay(self.pool, policy, rate=rate, limit=limit)
        return self._timed(done)

    def _timed(self, done: Replay) -> TimedRun:
        jobs = [o.job for o in done.outcomes if not o.shed]
        self.progress(f"{done.summary.policy} at rate {done.summary.rate:g}: TTFT p90 {_seconds(done.summary.ttft_s.p90)}")
        several = len({job.request.tenant for job in jobs}) > 1
        return TimedRun(summary=done.summary, tenants=tenant_shares(jobs, weights=self.tenant_weights) if several else [])

    def _found(self, policy: Policy, knee: Knee | None, classic: float | None, round_robin: float | None) -> KneeFound:
        if knee is None:
            return KneeFound(policy=policy.name, rate=None, requests_per_s=None)
        return KneeFound(
            policy=knee.policy.label,
            rate=knee.rate,
            requests_per_s=knee.rate * self.pool.trace.rate,
            to_classic=knee.rate / classic if classic else None,
            to_round_robin=knee.rate / round_robin if round_robin else None,
            at_knee=knee.summary,
        )

    def _scenario(self, limit: Ceiling, **measured: object) -> Scenario:
        empty = Scenario(
            workers=self.pool.workers,
            blocks=self.pool.model.blocks,
            routers=self.pool.routers,
            ceiling=Ceilings(infinite=limit.infinite, pooled=limit.pooled, pooled_blocks=limit.pooled_blocks),
        )
        return msgspec.structs.replace(empty, **measured)


def _seconds(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.2f} s"
