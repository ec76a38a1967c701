"""The records that `headrace bench replay` emits."""

from __future__ import annotations

import msgspec

from headrace.tools.replay_bench.dynamo import DynamoFacts
from headrace.tools.replay_bench.measure import Summary
from headrace.tools.replay_bench.sequential import Sequential
from headrace.tools.replay_bench.shares import TenantShare
from headrace.tools.replay_bench.trace import Trace


class TraceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the trace."""

    name: str
    requests: int
    duration_s: float
    requests_per_s: float
    blocks: int
    mean_tokens: float
    mean_output: float


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """The ceiling, as in `ceiling.Ceiling`."""

    infinite: float
    pooled: float
    pooled_blocks: int


class TimedRun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A replay and, where there are several tenants, their shares."""

    summary: Summary
    tenants: list[TenantShare] = []


class KneeFound(msgspec.Struct, frozen=True, kw_only=True):
    """The highest sustainable rate, as a factor on the trace's own; None = below all that was tried."""

    policy: str
    rate: float | None
    requests_per_s: float | None
    to_classic: float | None = None
    to_round_robin: float | None = None
    at_knee: Summary | None = None


class Scenario(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A pool, and everything measured on it."""

    workers: int
    blocks: int
    routers: int
    ceiling: Ceilings
    sequential: list[Sequential] = []
    runs: list[TimedRun] = []
    knees: list[KneeFound] = []
    around_knee: list[TimedRun] = []  # at parts of the classic's knee, in the order of AROUND_KNEE


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that one command has measured."""

    trace: TraceFacts
    seed: int
    scenarios: list[Scenario]
    dynamo: DynamoFacts | None = None  # where it took part


def facts(trace: Trace) -> TraceFacts:
    """Describe the requests as they arrive at rate 1."""
    count = len(trace.requests)
    return TraceFacts(
        name=trace.name,
        requests=count,
        duration_s=trace.duration_s,
        requests_per_s=trace.rate,
        blocks=trace.blocks,
        mean_tokens=sum(r.tokens for r in trace.requests) / count,
        mean_output=sum(r.output for r in trace.requests) / count,
    )
