"""Virtual token counters: the tokens charged to each tenant.

Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), the Virtual Token Counter. A tenant's counter is
the tokens charged to it over its weight; the tenant with the smallest counter is served next; one that comes back from being
idle is lifted to the smallest counter of those that wait, so that no tenant saves up credit by being away.

Differences: a tenant without a waiting request but with some that run is not idle: it is lifted only to `slack` below, or to
as far as it was behind when its last request was placed. Otherwise a tenant that sends the next request upon each answer or
each placement would never get its weight. Prompt tokens count as far as they are not cached, and are charged together with the
predicted output when a request is placed, not token by token as the output appears; `correct` and `settle` adjust the charge.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MOST_TOKENS = 10_000_000.0  # of one request; a message that says more is not believed
CLASSES_LEARNT = 64  # means are kept of this many classes; others are predicted by the default
FORGET_SCAN = 8  # of the longest idle tenants, how many are looked at for one that gains least by being forgotten


@dataclass(slots=True)
class Mean:
    """A running mean: plain at first, exponentially smoothed once it has 1 / smoothing samples."""

    value: float = 0.0
    samples: int = 0

    def add(self, value: float, smoothing: float) -> None:
        self.samples += 1
        self.value += (value - self.value) * max(smoothing, 1.0 / self.samples)


class Tenant:
    """`counter` is in tokens per weight. Only `VirtualTokenCounters` changes it."""

    __slots__ = ("counter", "gap", "left_at", "lifts", "name", "number", "orders", "outputs", "running", "weight")

    def __init__(self, name: str, number: int, weight: float) -> None:
        self.name = name
        self.number = number
        self.weight = weight
        self.counter = 0.0
        self.lifts = 0  # times the counter was lifted
        self.gap = 0.0  # height of the last lift
        self.running = 0  # open charges
        self.left_at = 0.0  # the smallest counter of the others when nothing of it waited any more
        self.orders: list[TenantOrder] = []  # where it stands sorted by its counter
        self.outputs: dict[str, Mean] = {}  # output tokens by class


class TenantOrder:
    """Keeps tenants by counter, smallest first. Adding and dropping cost a bisection and the shifting of a list of pointers."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: list[tuple[float, int, Tenant]] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Tenant]:
        return (row[2] for row in self.rows)

    @property
    def least(self) -> float:
        return self.rows[0][0]

    def enter(self, tenant: Tenant) -> None:
        tenant.orders.append(self)
        insort(self.rows, (tenant.counter, tenant.number, tenant))

    def leave(self, tenant: Tenant) -> None:
        tenant.orders.remove(self)
        del self.rows[self._find(tenant)]

    def move(self, tenant: Tenant, counter: float) -> None:
        del self.rows[self._find(tenant)]
        insort(self.rows, (counter, tenant.number, tenant))

    def _find(self, tenant: Tenant) -> int:
        return bisect_left(self.rows, (tenant.counter, tenant.number))  # shorter sorts before the row itself


@dataclass(slots=True)
class Charge:
    tenant: Tenant
    request_class: str
    lifts: int
    uncached: float
    output: float
    most_output: float


class VirtualTokenCounters:
    """Keeps the counters of all tenants, and the charges of requests that run.

    Memory is bounded: of `idle` tenants without waiting requests and of `open_charges` requests the oldest are forgotten (a
    forgotten charge stands as predicted).
    """

    def __init__(
        self,
        *,
        weights: Mapping[str, float],
        default_weight: float,
        slack: float,
        default_output_tokens: float,
        output_smoothing: float,
        idle: int,
        open_charges: int,
    ) -> None:
        self._weights = dict(weights)
        self._default_weight = default_weight
        self._slack = slack
        self._default_output = default_output_tokens
        self._smoothing = output_smoothing
        self._most_idle = idle
        self._most_open = open_charges
        self._tenants: dict[str, Tenant] = {}
        self._idle: OrderedDict[str, Tenant] = OrderedDict()
        self._active = TenantOrder()
        self._floor = 0.0
        self._numbers = 0
        self._open: OrderedDict[str, Charge] = OrderedDict()
        self._class_outputs: dict[str, Mean] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    @property
    def open(self) -> int:
        return len(self._open)

    @property
    def floor(self) -> float:
        """The smallest counter of the active tenants, or its value when the last of them went idle."""
        rows = self._active.rows
        return rows[0][0] if rows else self._floor

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, self._default_weight)

    def counter(self, tenant: str) -> float:
        known = self._tenants.get(tenant)
        return known.counter if known else 0.0

    def tenant(self, name: str) -> Tenant:
        known = self._tenants.get(name)
        if known is None:
            self._numbers += 1
            known = self._tenants[name] = self._idle[name] = Tenant(name, self._numbers, self.weight(name))
            if len(self._idle) > self._most_idle:
                self._forget_one(name)
        return known

    def _forget_one(self, keep: str) -> None:
        # Of those idle longest the one with the smallest counter: being lifted when it returns, it gains least by it.
        first = [name for name, _ in zip(self._idle, range(FORGET_SCAN), strict=False) if name != keep]
        victim = min(first, key=lambda name: self._idle[name].counter, default=keep)
        del self._idle[victim], self._tenants[victim]

    # Active and idle.

    def activate(self, tenant: Tenant) -> None:
        """Make a tenant active, because a request of it begins to wait. Credit saved while it was idle is lost."""
        self._lift(tenant, self.floor)
        self._tenants[tenant.name] = tenant  # it may have been forgotten since the caller looked
        self._idle.pop(tenant.name, None)
        self._active.enter(tenant)

    def _lift(self, tenant: Tenant, height: float) -> None:
        if tenant.running:  # as far behind as it was before the charges since
            height -= max(self._slack, tenant.left_at - tenant.counter)
        if tenant.counter < height:
            tenant.gap = height - tenant.counter
            tenant.lifts += 1
            tenant.counter = height

    def deactivate(self, tenant: Tenant) -> None:
        self._floor = self._active.least
        self._active.leave(tenant)
        tenant.left_at = self.floor
        self._idle[tenant.name] = tenant
        if len(self._idle) > self._most_idle:
            self._forget_one(tenant.name)

    def visit(self, tenant: Tenant) -> None:
        """Do what `activate` and then `deactivate` would do for an idle tenant, while no other is active."""
        self._lift(tenant, self._floor)
        self._floor = tenant.left_at = tenant.counter
        self._idle.move_to_end(tenant.name)

    # Charging.

    def charge(self, tenant: Tenant, tokens: float) -> None:
        """Charge tokens to a tenant. Negative amounts take back."""
        counter = tenant.counter + tokens / tenant.weight
        for order in tenant.orders:
            order.move(tenant, counter)
        tenant.counter = counter

    def predicted_output(self, tenant: str, request_class: str, most: float) -> float:
        """Predict the tokens of an answer: the tenant's mean in this class, or the class's, or the default; at most `most`."""
        known = self._tenants.get(tenant)
        mean = (known.outputs.get(request_class) if known else None) or self._class_outputs.get(request_class)
        return min(most, mean.value if mean else self._default_output)

    def place(self, request_id: str, tenant: Tenant, request_class: str, *, uncached: float, most_output: float) -> float:
        """Charge a request that is placed now. Return the tokens charged.

        A request that was placed before (it has moved) keeps the charge for that prompt, which was computed, and gets back the
        output predicted then.
        """
        if request_id in self._open:
            self.settle(request_id, output=0.0, complete=False)
        output = self.predicted_output(tenant.name, request_class, most_output)
        self.charge(tenant, uncached + output)
        tenant.running += 1
        self._open[request_id] = Charge(tenant, request_class, tenant.lifts, uncached, output, min(most_output, MOST_TOKENS))
        if len(self._open) > self._most_open:
            _, forgotten = self._open.popitem(last=False)
            forgotten.tenant.running -= 1
        return uncached + output

    def correct(self, request_id: str, *, uncached: float | None = None, output: float | None = None) -> bool:
        """Replace predictions by measured figures, as far as they can be true. Return whether the request is known here.

        Figures from 0 to MOST_TOKENS count, and no more output than the request allows.
        """
        charge = self._open.get(request_id)
        if charge is None:
            return False
        extra = 0.0
        if uncached is not None:
            uncached = min(max(uncached, 0.0), MOST_TOKENS)
            extra += uncached - charge.uncached
            charge.uncached = uncached
        if output is not None:
            output = min(max(output, 0.0), charge.most_output)
            extra += output - charge.output
            charge.output = output
        tenant = charge.tenant
        if charge.lifts != tenant.lifts:
            # It has been lifted since. With the right charge it would have been lifted to the same height: a refund changes
            # nothing (else the lift turns into credit), and more than predicted counts as far as it exceeds the lift.
            covered = min(max(extra, 0.0), tenant.gap * tenant.weight)
            tenant.gap -= covered / tenant.weight
            extra = max(extra - covered, 0.0)
        if extra:
            self.charge(tenant, extra)
        return True

    def settle(
        self, request_id: str, *, uncached: float | None = None, output: float | None = None, complete: bool = True
    ) -> bool:
        """Correct and drop the charge of a request that has ended. The output of a `complete` answer is learnt from."""
        if not self.correct(request_id, uncached=uncached, output=output):
            return False
        charge = self._open.pop(request_id)
        charge.tenant.running -= 1
        if complete and output is not None:
            output = charge.output  # as far as it was believed
            for means in (charge.tenant.outputs, self._class_outputs):
                if charge.request_class in means or len(means) < CLASSES_LEARNT:
                    means.setdefault(charge.request_class, Mean()).add(output, self._smoothing)
        return True
