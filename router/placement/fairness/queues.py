"""Queues of waiting requests: one per tenant, side by side in a lane."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import islice
from math import inf

from headrace.router.placement.fairness.virtual_tokens import Tenant, TenantOrder
from headrace.router.placement.types import Waiting

Row = tuple[float, float, int, "QueueEntry"]


class QueueEntry:
    """A waiting request. `row` is its place in its class's lane, `aged_row` that among the aged.

    The number is unique, so that comparisons of rows never reach the entry.
    """

    __slots__ = ("aged_row", "class_name", "due_s", "held", "number", "rank", "request", "row", "tenant", "tokens", "waiting")

    def __init__(self, request: Waiting, tenant: Tenant, *, class_name: str, rank: int, tokens: float, number: int) -> None:
        self.request = request
        self.tenant = tenant
        self.class_name = class_name
        self.rank = rank
        self.tokens = tokens
        self.waiting = True
        self.held = False
        self.number = number
        self.due_s = inf  # when it will have aged
        self.row: Row = (request.priority, request.arrived_s, number, self)
        self.aged_row: Row | None = None

    def drop_rows(self) -> None:
        """Drop the rows of an entry that has left: they hold the entry, and such a circle waits for the garbage collector."""
        del self.row
        self.aged_row = None


class Lane:
    """Holds queues of tenants, and the tenants that have one by their counters."""

    __slots__ = ("order", "queues")

    def __init__(self) -> None:
        self.order = TenantOrder()
        self.queues: dict[str, list[Row]] = {}

    def add(self, tenant: Tenant, row: Row) -> None:
        queue = self.queues.get(tenant.name)
        if queue is None:
            self.queues[tenant.name] = [row]
            self.order.enter(tenant)
        else:
            insort(queue, row)

    def remove(self, tenant: Tenant, row: Row) -> None:
        queue = self.queues[tenant.name]
        del queue[bisect_left(queue, row)]
        if not queue:
            del self.queues[tenant.name]
            self.order.leave(tenant)

    def split(self, most: float, limit: int) -> tuple[list[Tenant], list[Tenant]]:
        """Split the first `limit` tenants: those with a counter of at most `most`, and the others."""
        rows = self.order.rows
        if not rows:
            return [], []
        if rows[-1][0] <= most:
            return [row[2] for row in rows[: max(limit, 0)]], []
        first = list(islice(self.order, limit))
        cut = next((place for place, tenant in enumerate(first) if tenant.counter > most), len(first))
        return first[:cut], first[cut:]

    def interleaved(self, tenants: Iterable[Tenant], limit: int) -> list[QueueEntry]:
        """List the first entry of every queue, then the second of each, and so on, `limit` in all."""
        queues = [self.queues[tenant.name] for tenant in tenants]
        found: list[QueueEntry] = []
        depth = 0
        while len(queues) > 1 and len(found) < limit:
            found += [queue[depth][3] for queue in queues]
            depth += 1
            queues = [queue for queue in queues if len(queue) > depth]
        for queue in queues:
            found += [row[3] for row in queue[depth : depth + max(0, limit - len(found))]]
        return found[:limit]
