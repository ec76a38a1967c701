"""Admission: requests are let into the window, refused at once with a time to come back, or ended when they are overdue.

Nothing is remembered from one decision to the next: each looks at what waits now. So a refusal ends by itself as soon as the
backlog has shrunk, and there is no overloaded state to get stuck in.

A wait is predicted as (tokens placed and not yet computed + tokens before the request in fair order) over the pool's speed.
What comes later in a better class is not foreseen, nor are priorities inside a tenant: it is a lower bound for the first and
an upper one for urgent requests of a tenant that has others.
"""

from __future__ import annotations

from zlib import crc32

from headrace.broker.errors import missed
from headrace.router.placement.fair_queue import Amount, FairQueue
from headrace.router.placement.pool import PoolSpeed
from headrace.router.placement.settings import AdmissionSettings
from headrace.router.placement.types import Shed, Waiting


class Admission:
    """Answers every question from the backlog as it is now, without a state of its own."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings

    def admit(
        self,
        request: Waiting,
        *,
        uncached: float,
        queue: FairQueue,
        pool: PoolSpeed,
        now_s: float,
        service_s: float = 0.0,
        crowded: bool = True,
    ) -> Shed | None:
        """Decide about a new request: None lets it in.

        `crowded`: other tenants wait too; otherwise the limits of one tenant protect no other. `uncached`: tokens that have to
        be computed for the request; `service_s`: seconds from the start of its prefill to its first token. Costs O(1), and
        O(tenants) if the request is close to hopeless or refused.
        """
        settings = self._settings
        if request.deadline_s <= now_s:
            return self.late(request, now_s)
        if request.request_class in settings.protected or request.id in queue.entries:
            return None
        if queue.backlog.requests >= settings.window:
            total = queue.backlog.total
            message = f"{total.requests} requests wait, of at most {settings.window}"
            return self._shed(request, "queue_full", message, self._drain_s(total, settings.window, total.tokens, pool))
        return (
            (self._over_tenant(request, uncached, queue, pool) if crowded else None)
            or self._over_class(request, uncached, queue, pool)
            or (self._hopeless(request, queue, pool, now_s, service_s) if settings.hopeless else None)
        )

    def late(self, request: Waiting, now_s: float) -> Shed:
        return Shed(request=request, code="deadline", message=missed(now_s - request.arrived_s, request.attempt))

    def _over_tenant(self, request: Waiting, uncached: float, queue: FairQueue, pool: PoolSpeed) -> Shed | None:
        settings, tenant = self._settings, request.tenant
        waits = queue.backlog.of_tenant(tenant)
        most = settings.most_of_tenant(tenant)
        most_tokens = settings.tenant_tokens_of.get(tenant, settings.tenant_tokens)
        over = _over(waits, uncached, most, most_tokens)
        if not over:
            return None
        retry_s = self._drain_s(waits, most, queue.ahead(request), pool, uncached=uncached, most_tokens=most_tokens)
        return self._shed(request, "tenant_limit", f"tenant {tenant!r} has {over}", retry_s)

    def _over_class(self, request: Waiting, uncached: float, queue: FairQueue, pool: PoolSpeed) -> Shed | None:
        settings, name = self._settings, request.request_class
        waits = queue.backlog.of_class(name)
        most, most_tokens = settings.most_of_class(name), settings.class_tokens.get(name, 0)
        over = _over(waits, uncached, most, most_tokens)
        if not over:
            return None
        ahead = queue.ahead_at_most(name)
        retry_s = self._drain_s(waits, most, ahead, pool, uncached=uncached, most_tokens=most_tokens)
        return self._shed(request, "class_limit", f"class {name!r} has {over}", retry_s)

    def _hopeless(self, request: Waiting, queue: FairQueue, pool: PoolSpeed, now_s: float, service_s: float) -> Shed | None:
        left_s = request.deadline_s - now_s
        bearable_s = left_s * self._settings.hopeless_factor
        if not pool.wait_s(queue.ahead_at_most(request.request_class)) + service_s > bearable_s:
            return None
        ahead = queue.ahead(request)
        starts_s = pool.wait_s(ahead) + service_s
        if not starts_s > bearable_s:
            return None
        message = (
            f"the first token is predicted in {starts_s:.1f} s, the deadline is in {left_s:.1f} s: {ahead:.0f} tokens are "
            f"before it and {pool.pending_tokens:.0f} at the workers, which compute {pool.tokens_per_s:.0f} tokens/s"
        )
        # The same request with all of its time before it would just be served once so much of the backlog is gone.
        return self._shed(request, "deadline_hopeless", message, starts_s - max(left_s, request.deadline_s - request.arrived_s))

    def _drain_s(
        self, waits: Amount, most: int, ahead: float, pool: PoolSpeed, *, uncached: float = 0.0, most_tokens: int = 0
    ) -> float:
        """Predict when the backlog falls to `drain_to` of the limit, if it takes `ahead` tokens to work off all of it."""
        if pool.tokens_per_s <= 0:
            return self._settings.retry_unknown_s
        keep = self._settings.drain_to
        part = max(
            1 - keep * most / waits.requests if most and waits.requests else 0.0,
            1 - keep * most_tokens / (waits.tokens + uncached) if most_tokens and waits.tokens + uncached else 0.0,
            0.0,
        )
        return part * pool.wait_s(ahead)

    def _shed(self, request: Waiting, code: str, message: str, retry_s: float) -> Shed:
        settings = self._settings
        spread = 1 + settings.jitter * crc32(request.id.encode()) / 0xFFFFFFFF
        least, most = settings.retry_least_s, settings.retry_most_s / (1 + settings.jitter)
        return Shed(request=request, code=code, message=message, retry_after_s=min(max(retry_s, least), most) * spread)


def _over(waits: Amount, uncached: float, most: int, most_tokens: int) -> str:
    if most and waits.requests >= most:
        return f"{waits.requests} requests waiting, of at most {most}"
    if most_tokens and waits.requests and waits.tokens + uncached > most_tokens:
        return f"{waits.tokens:.0f} uncached tokens waiting, which with {uncached:.0f} more exceeds {most_tokens}"
    return ""


def unplaceable(request: Waiting, waited_s: float) -> Shed:
    """Refuse a request that no worker may take for so long."""
    wants = [f"worker {request.worker!r}"] if request.worker else []
    wants += [f"label {label!r}" for label in sorted(request.require)]
    wants += [f"adapter {request.adapter!r}"] if request.adapter else []
    message = f"no live worker may take it since {waited_s:.1f} s: it wants {', '.join(wants) or 'one that does not drain'}"
    return Shed(request=request, code="no_eligible_worker", message=message, retry_after_s=5.0)
