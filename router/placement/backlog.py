"""The backlog by class and tenant: waiting requests, and the prompt tokens that will have to be computed for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Amount(NamedTuple):
    """Waiting requests and their uncached prompt tokens."""

    requests: int = 0
    tokens: float = 0.0


NOTHING = Amount()
_Sums = dict[str, list[float]]  # requests and tokens by name: lists, which change in place


class Backlog:
    """Keeps the sums current. Their number is bounded by the waiting requests, because empty sums are dropped."""

    __slots__ = ("_both", "_classes", "_requests", "_tenants", "_tokens")

    def __init__(self) -> None:
        self._requests = 0
        self._tokens = 0.0
        self._classes: _Sums = {}
        self._tenants: _Sums = {}
        self._both: dict[str, _Sums] = {}

    @property
    def total(self) -> Amount:
        return Amount(self._requests, self._tokens)

    def of_class(self, request_class: str) -> Amount:
        return _amount(self._classes.get(request_class))

    def of_tenant(self, tenant: str) -> Amount:
        return _amount(self._tenants.get(tenant))

    def tokens_of(self, classes: Iterable[str]) -> float:
        """Add up the tokens of these classes."""
        tokens, sums = 0.0, self._classes
        if sums:
            for name in classes:
                if name in sums:
                    tokens += sums[name][1]
        return tokens

    def tenants(self, request_class: str) -> Mapping[str, Amount]:
        """Return the backlog of a class by tenant."""
        return {tenant: _amount(sums) for tenant, sums in self._both.get(request_class, {}).items()}

    def has_others(self, tenant: str) -> bool:
        """Return whether requests of another tenant wait."""
        return len(self._tenants) > (tenant in self._tenants)

    def counts(self) -> dict[tuple[str, str], int]:
        """Count requests by (class, tenant)."""
        return {(name, tenant): int(one[0]) for name, sums in self._both.items() for tenant, one in sums.items()}

    def add(self, request_class: str, tenant: str, *, requests: int = 0, tokens: float = 0.0) -> None:
        """Add to the sums. Negative amounts take away."""
        self._requests += requests
        left = self._tokens + tokens
        if self._requests <= 0:
            self._requests, left = 0, 0.0  # and no tokens, so that rounding never adds up
        self._tokens = max(0.0, left)
        both = self._both.get(request_class)
        if both is None:
            both = self._both[request_class] = {}
        for sums, name in ((self._classes, request_class), (self._tenants, tenant), (both, tenant)):
            one = sums.get(name)
            if one is None:
                one = sums[name] = [0, 0.0]
            one[0] += requests
            left = one[1] + tokens
            one[1] = max(0.0, left)
            if one[0] <= 0:
                del sums[name]
        if not both:
            del self._both[request_class]


def _amount(sums: list[float] | None) -> Amount:
    return NOTHING if sums is None else Amount(int(sums[0]), sums[1])
