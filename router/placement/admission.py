"""Admission: requests are let into the window, refused at once with a time to come back, or ended when they are overdue.

Nothing is remembered from one decision to the next: each looks at what waits now. So a refusal ends by itself as soon as the
backlog has shrunk, and there is no overloaded state to get stuck in.

A wait is predicted as (tokens placed and not yet computed + tokens before the request in fair order) over the pool's speed.
What comes later in a better class is not foreseen, nor are priorities inside a tenant: it is a lower bound for the first and
an upper one for urgent requests of a tenant that has others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

from headrace.broker.errors import missed
from headrace.router.placement.cost import CostMatrix, CostRow
from headrace.router.placement.disagg_planner import DisaggPlanner, no_prefill_worker
from headrace.router.placement.fair_queue import Amount, FairQueue
from headrace.router.placement.load import LoadTable
from headrace.router.placement.settings import AdmissionSettings, SchedulerSettings
from headrace.router.placement.turn_queues import TurnQueues
from headrace.router.placement.types import Shed, Waiting
from headrace.router.placement.worker_view import comes


@dataclass(frozen=True, slots=True)
class PoolSpeed:
    tokens_per_s: float  # prompt tokens that all workers together compute; 0 = not known (there is no worker, say)
    pending_tokens: float = 0.0  # placed and not yet computed

    def wait_s(self, tokens: float) -> float:
        """Predict the wait until the prefill of a request with so many tokens before it; 0 if the speed is not known."""
        return (self.pending_tokens + tokens) / self.tokens_per_s if self.tokens_per_s > 0 else 0.0


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
        if request.request_class in settings.protected or request.id in queue:
            return None
        total = queue.backlog.total
        if total.requests >= settings.window:
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


class Unplaceable:
    """Watches a window for requests that no worker may take. They wait up to `patience_s` for one, or for a waking one."""

    def __init__(self, window: CostMatrix, loads: LoadTable, *, patience_s: float) -> None:
        self._window = window
        self._loads = loads
        self._patience_s = patience_s
        self._ids: dict[str, None] = {}

    def check(self, row: CostRow) -> None:
        if row.ineligible_since_s is not None:
            self._ids[row.request.id] = None

    def recheck(self) -> None:
        self._ids.clear()
        for row in self._window.rows.values():
            self.check(row)

    def remove(self, request_id: str) -> None:
        self._ids.pop(request_id, None)

    def overdue(self, now_s: float) -> list[Shed]:
        found = []
        for request_id in list(self._ids):
            row = self._window.rows.get(request_id)
            if row is None or row.ineligible_since_s is None:
                self._ids.pop(request_id)
            elif now_s - row.ineligible_since_s > self._patience_s and not comes(row.request, self._loads):
                found.append(_shed(row.request, now_s - row.ineligible_since_s))
        return found


class OverdueRequests:
    """Finds the requests of one window that have waited for too long, and takes them out of the queue."""

    def __init__(
        self,
        settings: SchedulerSettings,
        loads: LoadTable,
        window: CostMatrix,
        queue: TurnQueues,
        admission: Admission,
        unplaceable: Unplaceable,
        disagg: DisaggPlanner,
    ) -> None:
        self._refuses_unready = settings.prefill_unready == "refuse"
        self._loads = loads
        self._window = window
        self._queue = queue
        self._admission = admission
        self._unplaceable = unplaceable
        self._disagg = disagg

    def shed(self, now_s: float, drop: Callable[[str], None]) -> list[Shed]:
        """List the refusals. Each request is handed to `drop`, which takes it out of the window."""
        late = []
        for request in self._queue.expired(now_s):
            drop(request.id)  # before the others are looked for, which it might be one of
            late.append(self._admission.late(request, now_s))
        refused = self._unplaceable.overdue(now_s) if len(self._loads) else []
        if self._refuses_unready:
            rows = self._disagg.refused(self._window, self._disagg.prefill_side(now_s))
            refused += [no_prefill_worker(row.request) for row in rows]
        for shed in refused:
            self._queue.remove(shed.request.id)
            drop(shed.request.id)
        return late + refused


def _shed(request: Waiting, waited_s: float) -> Shed:
    wants = [f"worker {request.worker!r}"] if request.worker else []
    wants += [f"label {label!r}" for label in sorted(request.require)]
    wants += [f"adapter {request.adapter!r}"] if request.adapter else []
    message = f"no live worker may take it since {waited_s:.1f} s: it wants {', '.join(wants) or 'one that does not drain'}"
    return Shed(request=request, code="no_eligible_worker", message=message, retry_after_s=5.0)
