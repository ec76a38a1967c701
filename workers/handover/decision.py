"""Decides where a decode worker has a prompt computed: the router's decision if it is still possible, else a plain rule.

The decision is a pure function. Its reasons are the router's (`router/placement/disagg/prefill_costs.py`) and label the metric.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from headrace.broker.messages import PrefillDecision
from headrace.workers.engine import Role
from headrace.workers.settings import PrefillMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The state of a decode worker when a run starts."""

    role: Role
    hands_over: bool  # whether the engine can hand over
    peers: frozenset[str]  # prefill workers that are ready
    tokens: int  # tokens that must be in the cache before the first token
    uncached: int  # those of `tokens` that this engine's cache lacks
    block_size: int
    directed: str = ""  # the one of `peers` to direct the job to, if others that may accept it cannot do it; empty = any
    needs_own_prefill: str = ""  # the part of the request that needs the whole prompt computed here, if any


def decide(routed: PrefillDecision | None, here: Situation, *, mode: PrefillMode, min_tokens: int) -> PrefillDecision:
    """Decide where to compute a prompt. `mode` and `min_tokens` count if no router has decided."""
    if here.role is not Role.DECODE or not here.hands_over:
        return _local("aggregated")
    if routed is not None and not routed.remote:
        return routed
    if routed is None and mode == "never":
        return _local("never")
    if here.needs_own_prefill:
        return _local(here.needs_own_prefill)
    if not here.peers:
        return _local("no_prefill_worker")
    if here.uncached <= here.block_size:
        # There is no whole block to fetch.
        return _local("cached" if here.tokens > here.block_size else "short")
    if routed is not None:
        if routed.worker in here.peers:
            return routed
        if routed.worker:
            return PrefillDecision(remote=True, reason=routed.reason, worker=here.directed)
        return msgspec.structs.replace(routed, worker=here.directed) if here.directed else routed
    if mode == "always":
        return PrefillDecision(remote=True, reason="always", worker=here.directed)
    if here.uncached < min_tokens:
        return _local("short" if here.tokens < min_tokens else "cached")
    return PrefillDecision(remote=True, reason="pays", worker=here.directed)


def _local(reason: str) -> PrefillDecision:
    return PrefillDecision(remote=False, reason=reason)
