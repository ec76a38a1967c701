"""Pools in which prompts may be computed by prefill workers."""

from __future__ import annotations

from typing import Any

from headrace.router.placement.types import Placement
from tests.support.router.placement_pool import Pool, chain

LONG = chain(1, 16)  # 8,192 tokens: 0.34 s of prefill


def apart(decoding: str = "a", prefilling: str = "p", **settings: Any) -> Pool:
    """Decode workers with four sequences each, and prefill workers."""
    pool = Pool("", **settings)
    pool.apart(decode=decoding, prefill=prefilling)
    for worker in decoding:
        pool.report(worker, running=4)
    return pool


def where(placement: Placement) -> tuple[bool, str]:
    assert placement.prefill is not None
    return placement.prefill.remote, placement.prefill.reason


def elsewhere(pool: Pool, request_id: str, tokens: int, *, decode: str = "a", prefill: str = "*") -> None:
    """Another router has placed this, to be computed by a prefill worker."""
    pool.event("placed", request_id, decode, tokens=tokens, uncached=tokens, blocks=0, by="r2", prefill=prefill)
