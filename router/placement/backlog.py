"""The backlog by class and tenant: waiting requests, and the prompt tokens that will have to be computed for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Amount(NamedTuple):
    """Waiting requests and their uncached prompt tokens."""

    requests: int = 0
    tokens: float = 0.0


NOTHING = Amount()


class Backlog:
    """Keeps the sums current. Their number is bounded by the waiting requests, because empty sums are dropped."""

    __slots__ = ("_both", "_classes", "_tenants", "_total")

    def __init__(self) -> None:
        self._total = NOTHING
        self._classes: dict[str, Amount] = {}
        self._tenants: dict[str, Amount] = {}
        self._both: dict[str, dict[str, Amount]] = {}

    @property
    def total(self) -> Amount:
        return self._total

    def of_class(self, request_class: str) -> Amount:
        return self._classes.get(request_class, NOTHING)

    def of_tenant(self, tenant: str) -> Amount:
        return self._tenants.get(tenant, NOTHING)

    def tenants(self, request_class: str) -> Mapping[str, Amount]:
        """Return the backlog of a class by tenant."""
        return self._both.get(request_class, {})

    def counts(self) -> dict[tuple[str, str], int]:
        """Count requests by (class, tenant)."""
        return {(name, tenant): amount.requests for name, sums in self._both.items() for tenant, amount in sums.items()}

    def add(self, request_class: str, tenant: str, *, requests: int = 0, tokens: float = 0.0) -> None:
        """Add to the sums. Negative amounts take away."""
        self._total = _plus(self._total, requests, tokens)
        _change(self._classes, request_class, requests, tokens)
        _change(self._tenants, tenant, requests, tokens)
        sums = self._both.setdefault(request_class, {})
        _change(sums, tenant, requests, tokens)
        if not sums:
            del self._both[request_class]


def _plus(amount: Amount, requests: int, tokens: float) -> Amount:
    left = amount.requests + requests
    if left <= 0:
        return NOTHING  # and no tokens, so that rounding never adds up
    tokens += amount.tokens
    return Amount(left, max(0.0, tokens))


def _change(sums: dict[str, Amount], key: str, requests: int, tokens: float) -> None:
    before = sums.get(key)
    if before is not None:
        requests += before.requests
        tokens += before.tokens
    if requests > 0:
        sums[key] = Amount(requests, max(0.0, tokens))
    else:
        sums.pop(key, None)
