"""The ceiling of the hit rate: the same requests in the same order on a single cache, without any placement."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.router.replay.prefix_cache import PrefixCache
from headrace.tools.replay_bench.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """Blocks that hit, as parts of all blocks, in an infinite cache and in a pooled one.

    `pooled` is an LRU cache as large as those of all workers together. It is no strict bound: a placement that keeps the right
    blocks can beat it.
    """

    infinite: float
    pooled: float
    pooled_blocks: int


def ceiling(trace: Trace, *, pooled_blocks: int) -> Ceiling:
    """Compute the ceiling of a trace."""
    return Ceiling(infinite=_infinite_rate(trace), pooled=lru_rate(trace, blocks=pooled_blocks), pooled_blocks=pooled_blocks)


def lru_rate(trace: Trace, *, blocks: int) -> float:
    """Compute the hit rate in blocks of an LRU cache that sees the requests one after the other."""
    cache = PrefixCache(blocks)
    hits = 0
    for request in trace.requests:
        hits += cache.match(request.chain)
        cache.touch(request.chain)
    return hits / trace.blocks


def _infinite_rate(trace: Trace) -> float:
    seen: set[int] = set()
    hits = 0
    for request in trace.requests:
        for block in request.chain:
            if block not in seen:
                break
            hits += 1
        seen.update(request.chain)
    return hits / trace.blocks
