"""Remembers which pools had a worker lately: a model is neither gone nor out of offer while its workers restart."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.broker.membership.members import Members

LATELY_S = 60.0


class ServedPools:
    """The pools that accept requests now, and when others did so last. Sans-io: the time is passed in."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._serving: set[str] = set()
        self._left_s: dict[str, float] = {}  # when a pool's last worker was gone

    def refresh(self, pools: Iterable[str], now_s: float) -> None:
        """Compare with the leases. To be called after each of their changes, with the pools of all known models."""
        serving = {pool for pool in pools if self._members.serving_workers(pool)}
        self._left_s |= dict.fromkeys(self._serving - serving, now_s)
        self._left_s = {pool: left_s for pool, left_s in self._left_s.items() if now_s - left_s < LATELY_S}
        self._serving = serving

    def lately(self, pool: str, now_s: float) -> bool:
        """Return whether the pool has a worker that accepts requests, or had one less than `LATELY_S` ago."""
        left_s = self._left_s.get(pool)
        return pool in self._serving or (left_s is not None and now_s - left_s < LATELY_S)
