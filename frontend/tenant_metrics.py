"""The metrics of tenants where keys are in force: requests, tokens, times to the first token, refusals by quotas.

Tenants of keys have series of their own, up to a limit, in the order in which they come; all others share one.  A name that is
in a header, and is no key's tenant, is never a label.  A request is counted once, when it has ended.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from headrace.base.metrics import Counter
from headrace.broker.bounded_label import OTHER

QUOTA = "rate_limit_exceeded"


class TenantSeries:
    """The series of one tenant."""

    __slots__ = ("_by_status", "_requests", "first_s", "firsts", "output", "prompt", "refused", "tenant")

    def __init__(self, tenant: str, requests: Counter, *others: Counter) -> None:
        self.tenant = tenant
        self._requests = requests
        self._by_status: dict[int, Counter] = {}
        self.prompt, self.output, self.first_s, self.firsts, self.refused = (other.labels(tenant) for other in others)

    def answered(self, status: int) -> None:
        """Count a request by the class of its status; 0 means that none was sent."""
        kind = status // 100
        counter = self._by_status.get(kind)
        if counter is None:
            counter = self._by_status[kind] = self._requests.labels(self.tenant, f"{kind}xx" if kind else "none")
        counter.inc()

    def used(self, prompt: int, output: int) -> None:
        """Count the tokens of a request or a stored job."""
        self.prompt.inc(prompt)
        self.output.inc(output)


class TenantMetrics:
    """The series of all tenants of one frontend. Nothing is counted before `hold`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, meaning: str, *more: str) -> Counter:
            return Counter(f"headrace_frontend_tenant_{name}", meaning, ["tenant", *more], registry=registry)

        self._counters = (
            counter("requests", "Answered HTTP requests of tenants of keys, by the class of their status", "status"),
            counter("prompt_tokens", "Prompt tokens of ended requests and stored jobs of tenants of keys"),
            counter("output_tokens", "Output tokens of ended requests and stored jobs of tenants of keys"),
            counter("first_token_seconds", "Sum of the times from a request of a tenant of keys to its first token"),
            counter("first_tokens", "Requests of tenants of keys that had a first token"),
            counter("quota_refusals", "Requests refused because their key or its tenant has used what it may"),
        )
        self._most = 0
        self._known: Callable[[str], bool] = lambda _tenant: False
        self._series: dict[str, TenantSeries] = {}
        self._other: TenantSeries | None = None

    def hold(self, most: int, known: Callable[[str], bool]) -> None:
        """Give at most `most` tenants series of their own. `known(tenant)`: a stored key has this tenant."""
        self._most, self._known = most, known

    def of(self, tenant: str, *, own: bool) -> TenantSeries:
        """Return the series of a tenant. `own`: a key of it was used just now."""
        found = self._series.get(tenant)
        if found is None:
            if len(self._series) < self._most and (own or self._known(tenant)):
                found = self._series[tenant] = TenantSeries(tenant, *self._counters)
            else:
                found = self._other = self._other or TenantSeries(OTHER, *self._counters)
        return found
