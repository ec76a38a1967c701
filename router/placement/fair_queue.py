"""Fair order of the scheduling window between classes, tenants and requests, with its backlog and its deadlines."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from math import inf, isfinite
from typing import Generic, NamedTuple, Protocol, TypeVar

from headrace.router.placement.settings import FairClass, FairnessSettings
from headrace.router.placement.types import Waiting
from headrace.router.placement.virtual_tokens import Tenant, TenantOrder, VirtualTokenCounters

WASTE = 256  # removed items that are not worth rebuilding the heap for


class Removable(Protocol):
    waiting: bool


T = TypeVar("T", bound=Removable)


class ExpiryHeap(Generic[T]):
    """A heap of items by due time, most of which are removed before: removal is lazy, and the waste is bounded.

    Adding costs O(log n), removal O(1) amortised, the next due one O(1). Infinite times are never due and cost nothing.
    """

    __slots__ = ("_heap", "_number", "_waste")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._number = 0
        self._waste = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, due_s: float, item: T) -> None:
        if due_s < float("inf"):
            self._number += 1
            heappush(self._heap, (due_s, self._number, item))

    def removed(self) -> None:
        """Note that an item has stopped waiting. Once those are the majority, the heap is rebuilt without them."""
        self._waste += 1
        if self._waste > WASTE and 2 * self._waste > len(self._heap):
            self._heap = [row for row in self._heap if row[2].waiting]
            heapify(self._heap)
            self._waste = 0

    def next_s(self) -> float:
        """Return when the next item is due; inf = never."""
        heap = self._heap
        while heap and not heap[0][2].waiting:
            heappop(heap)
        return heap[0][0] if heap else float("inf")

    def pop_due(self, now_s: float) -> Iterator[T]:
        while self.next_s() <= now_s:
            yield heappop(self._heap)[2]


class Amount(NamedTuple):
    """Waiting requests and their uncached prompt tokens."""

    requests: int = 0
    tokens: float = 0.0


NOTHING = Amount()
_Sums = dict[str, list[float]]  # requests and tokens by name: lists, which change in place


class Backlog:
    """The backlog by class and tenant. Its size is bounded by the waiting requests, because empty sums are dropped."""

    __slots__ = ("_both", "_classes", "_tenants", "_tokens", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self._tokens = 0.0
        self._classes: _Sums = {}
        self._tenants: _Sums = {}
        self._both: dict[str, _Sums] = {}

    @property
    def total(self) -> Amount:
        return Amount(self.requests, self._tokens)

    def of_class(self, request_class: str) -> Amount:
        return _amount(self._classes.get(request_class))

    def of_tenant(self, tenant: str) -> Amount:
        return _amount(self._tenants.get(tenant))

    def tokens_of(self, classes: Iterable[str]) -> float:
        tokens, sums = 0.0, self._classes
        if sums:
            for name in classes:
                if name in sums:
                    tokens += sums[name][1]
        return tokens

    def tenants(self, request_class: str) -> Mapping[str, Amount]:
        return {tenant: _amount(sums) for tenant, sums in self._both.get(request_class, {}).items()}

    def has_others(self, tenant: str) -> bool:
        return len(self._tenants) > (tenant in self._tenants)

    def counts(self) -> dict[tuple[str, str], int]:
        return {(name, tenant): int(one[0]) for name, sums in self._both.items() for tenant, one in sums.items()}

    def add(self, request_class: str, tenant: str, *, requests: int = 0, tokens: float = 0.0) -> None:
        """Add to the sums. Negative amounts take away."""
        self.requests += requests
        left = self._tokens + tokens
        if self.requests <= 0:
            self.requests, left = 0, 0.0  # and no tokens, so that rounding never adds up
        self._tokens = 0.0
        if left > 0.0:  # `max` would be a call more, four times per change
            self._tokens = left
        both = self._both.get(request_class)
        if both is None:
            both = self._both[request_class] = {}
        for sums, name in ((self._classes, request_class), (self._tenants, tenant), (both, tenant)):
            one = sums.get(name)
            if one is None:
                one = sums[name] = [0, 0.0]
            one[0] += requests
            left = one[1] + tokens
            one[1] = 0.0
            if left > 0.0:
                one[1] = left
            if one[0] <= 0:
                del sums[name]
        if not both:
            del self._both[request_class]


def _amount(sums: list[float] | None) -> Amount:
    return NOTHING if sums is None else Amount(int(sums[0]), sums[1])


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
        del self.row
        self.aged_row = None


class Lane:
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
        rows = self.order.rows
        if not rows:
            return [], []
        if rows[-1][0] <= most:
            return [row[2] for row in rows[: max(limit, 0)]], []
        first = list(islice(self.order, limit))
        cut = next((place for place, tenant in enumerate(first) if tenant.counter > most), len(first))
        return first[:cut], first[cut:]

    def interleaved(self, tenants: Iterable[Tenant], limit: int) -> list[QueueEntry]:
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


# Fair order of the scheduling window: between classes, tenants and requests.
#
# *Classes.* Lower rank first. A request that has waited for its class's ageing time also gets in through a second door: the
# requests that have aged, whatever their class, have `aged_share` of the tokens placed while they wait, and cannot be denied
# that by any flood of a better class; nor can they take more from it. So every request's wait is bounded by its ageing time
# plus what aged before it over that share of the pool's speed. A class that is `always_first` (moved work) goes before both.
#
# *Tenants.* Virtual token counters, see `virtual_tokens.py`, over all classes: a tenant's share comes before its class, so
# that a flood in a better class takes nothing from others. All tenants within `slack_tokens` of the smallest counter are
# eligible at once, which leaves the scheduler a choice of pairings (request × cached prefix) and bounds what one may get
# ahead of another; classes are in order among those.
#
# *Requests of a tenant.* `priority`, then arrival; one whose deadline is less than `tight_s` after its arrival counts as
# having arrived when its deadline would not have been tight. So it overtakes only what came in the `tight_s` before it.

UNKNOWN_CLASSES = 64  # names of classes that are not configured are counted up to this many
_NO_REQUESTS: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ClassGroup:
    """Requests among which the choice is free.

    `over_share`: their tenants have had more than others that wait.  They may have the room that none of those can use, not the
    room that one of those does not want yet.
    """

    requests: Sequence[Waiting]
    over_share: bool = False
    batch: bool = False  # they may have only what interactive requests leave
    kept: bool = False  # the worker may not preempt them


class FairQueue:
    """Keeps the waiting requests in fair order. Times are seconds of the caller's one clock; tokens are uncached prompt tokens.

    A request is added, then either removed (cancelled, shed, expired: costs its tenant nothing) or placed (charged); what was
    charged is corrected as more becomes known, and settled when the request ends.
    """

    def __init__(self, settings: FairnessSettings) -> None:
        self._settings = settings
        self._classes = {one.name: one for one in settings.classes}
        self._last_class = max(settings.classes, key=lambda one: one.rank)
        ranks = sorted({one.rank for one in settings.classes})
        self._lanes = {rank: Lane() for rank in ranks}
        self._upto = {rank: tuple(one.name for one in settings.classes if one.rank <= rank) for rank in ranks}
        first = {one.rank for one in settings.classes if one.always_first}
        self._first_lanes = [self._lanes[rank] for rank in ranks if rank in first]
        self._other_lanes = [self._lanes[rank] for rank in ranks if rank not in first]
        self._aged = Lane()
        self._balance = 0.0  # tokens that the aged have had beyond their share, as a negative number; they save nothing up
        self._aged_offered: frozenset[str] = _NO_REQUESTS  # offered as aged, the last time
        self.entries: dict[str, QueueEntry] = {}
        self._active: Counter[str] = Counter()  # requests in a lane, by tenant
        self._ageing: ExpiryHeap[QueueEntry] = ExpiryHeap()
        self._deadlines: ExpiryHeap[QueueEntry] = ExpiryHeap()
        self._number = 0
        self._groups: list[ClassGroup] | None = None
        self._groups_limit = 0
        self.charged = 0.0  # tokens that the last placement was charged
        self.backlog = Backlog()
        self.unknown_classes: Counter[str] = Counter()
        self.accounts = VirtualTokenCounters(
            weights=settings.weights,
            default_weight=settings.default_weight,
            slack=settings.slack_tokens,
            default_output_tokens=settings.default_output_tokens,
            output_smoothing=settings.output_smoothing,
            idle=settings.idle_tenants,
            open_charges=settings.open_charges,
        )

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.entries

    def get(self, request_id: str) -> Waiting | None:
        entry = self.entries.get(request_id)
        return entry.request if entry else None

    def __iter__(self) -> Iterator[Waiting]:
        return (entry.request for entry in self.entries.values())

    # Waiting requests.

    def add(self, request: Waiting, *, tokens: float | None = None) -> None:
        """Add a request, in place of one of the same id. `tokens`: uncached ones, by default all."""
        if request.id in self.entries:
            self.remove(request.id)
        fair_class = self._classes.get(request.request_class)
        if fair_class is None:
            if request.request_class in self.unknown_classes or len(self.unknown_classes) < UNKNOWN_CLASSES:
                self.unknown_classes[request.request_class] += 1
            fair_class = self._last_class
        arrived_s = request.arrived_s if isfinite(request.arrived_s) else 0.0
        tight_s = self._settings.tight_s
        # A deadline that is not a number sorts as none; one long past gains no more than tight_s.
        deadline_s = request.deadline_s if request.deadline_s == request.deadline_s else inf
        key_s = max(min(arrived_s, deadline_s - tight_s), arrived_s - tight_s)
        self._number += 1
        entry = QueueEntry(
            request,
            self.accounts.tenant(request.tenant),
            class_name=fair_class.name,
            rank=fair_class.rank,
            tokens=request.tokens if tokens is None else tokens,
            number=self._number,
        )
        entry.row = (request.priority, key_s, self._number, entry)
        entry.due_s = arrived_s + fair_class.ageing_s
        self.entries[request.id] = entry
        self.backlog.add(fair_class.name, request.tenant, requests=1, tokens=entry.tokens)
        self._ageing.add(entry.due_s, entry)
        self._deadlines.add(deadline_s, entry)
        self._enter(entry)

    def remove(self, request_id: str) -> Waiting | None:
        """Remove a request; its tenant is charged nothing. An unknown one is ignored."""
        entry = self.entries.pop(request_id, None)
        if entry is None:
            return None
        if not entry.held:
            self._leave(entry)
        entry.waiting = False
        entry.drop_rows()
        self._ageing.removed()
        self._deadlines.removed()
        self.backlog.add(entry.class_name, entry.request.tenant, requests=-1, tokens=-entry.tokens)
        return entry.request

    def update(self, request_id: str, tokens: float) -> None:
        entry = self.entries.get(request_id)
        if entry is not None and tokens != entry.tokens:
            self.backlog.add(entry.class_name, entry.request.tenant, tokens=tokens - entry.tokens)
            entry.tokens = tokens

    def hold(self, request_id: str) -> None:
        """Do not offer a request until `release` (it waits for one particular worker, say). Unknown or held ones are ignored.

        The request stays counted and its deadline watched, but its tenant is idle if it has nothing else.
        """
        entry = self.entries.get(request_id)
        if entry is not None and not entry.held:
            self._leave(entry)
            entry.held = True

    def release(self, request_id: str) -> None:
        """Offer a held request again, in its old place. Others are ignored."""
        entry = self.entries.get(request_id)
        if entry is not None and entry.held:
            entry.held = False
            self._enter(entry)

    def expired(self, now_s: float) -> list[Waiting]:
        late = [entry.request for entry in self._deadlines.pop_due(now_s)]
        for request in late:
            self.remove(request.id)
        return late

    def next_deadline_s(self) -> float:
        return self._deadlines.next_s()

    def counts(self) -> dict[tuple[str, str], int]:
        return self.backlog.counts()

    def _enter(self, entry: QueueEntry) -> None:
        tenant = entry.tenant = self.accounts.tenant(entry.request.tenant)  # an idle one may have been forgotten meanwhile
        if not self._active[tenant.name]:
            self.accounts.activate(tenant)
        self._active[tenant.name] += 1
        self._lanes[entry.rank].add(tenant, entry.row)
        if entry.aged_row is not None:
            self._aged.add(tenant, entry.aged_row)
        self._groups = None

    def _leave(self, entry: QueueEntry) -> None:
        tenant = entry.tenant
        self._lanes[entry.rank].remove(tenant, entry.row)
        if entry.aged_row is not None:
            self._aged.remove(tenant, entry.aged_row)
        self._active[tenant.name] -= 1
        if not self._active[tenant.name]:
            del self._active[tenant.name]
            self.accounts.deactivate(tenant)
        self._groups = None

    # Turns.

    def heads(self, limit: int, now_s: float) -> Sequence[Waiting]:
        return [request for group in self.groups(limit, now_s) for request in group.requests]

    def groups(self, limit: int, now_s: float) -> Sequence[ClassGroup]:
        """Group the candidates, at most `limit` in all. Do not keep the groups over a change of the queue.

        Choose freely within a group, and from a later group only if nothing of the earlier ones can be placed now. Costs
        O(limit), and nothing if nothing has changed.
        """
        if self._ageing.next_s() <= now_s:
            self._age(now_s)
        if self._groups is None or self._groups_limit != limit:
            self._groups, self._groups_limit = self._make_groups(limit), limit
        return self._groups

    def _make_groups(self, limit: int) -> list[ClassGroup]:
        most = self.accounts.floor + self._settings.slack_tokens
        groups: list[ClassGroup] = []
        self._aged_offered = _NO_REQUESTS
        left = limit
        for lane in self._first_lanes:
            if lane.queues:
                left -= self._add(groups, lane, [*chain.from_iterable(lane.split(most, left))], left)
        if self._aged.queues and self._balance >= 0.0 and left > 0:
            # Only the longest waiting one of each tenant, so that none is passed over again and again.
            eligible, _ = self._aged.split(most, left)
            group = [self._aged.queues[tenant.name][0][3].request for tenant in eligible]
            if group:
                self._aged_offered = frozenset(request.id for request in group)
                groups.append(ClassGroup(group))
                left -= len(group)
        offered = max(left, 0) + len(self._aged_offered)
        splits = [(lane, lane.split(most, offered)) for lane in self._other_lanes if lane.queues]
        for over_share in (False, True):
            for lane, split in splits:
                if split[over_share]:
                    left -= self._add(groups, lane, split[over_share], left, over_share=over_share)
        return groups

    def _add(self, groups: list[ClassGroup], lane: Lane, tenants: list[Tenant], limit: int, *, over_share: bool = False) -> int:
        if limit <= 0 or not tenants:
            return 0
        offered = self._aged_offered
        group = [entry.request for entry in lane.interleaved(tenants, limit + len(offered))]
        if offered:
            group = [request for request in group if request.id not in offered][:limit]
        if group:
            groups.append(ClassGroup(group, over_share=over_share))
        return len(group)

    def _age(self, now_s: float) -> None:
        for entry in self._ageing.pop_due(now_s):
            entry.aged_row = (entry.due_s, 0.0, entry.number, entry)
            if not entry.held:
                self._aged.add(entry.tenant, entry.aged_row)
        self._groups = None

    def ahead_at_most(self, request_class: str) -> float:
        """Bound `ahead` from above for a request of this class that came now. O(classes)."""
        rank = self._classes.get(request_class, self._last_class).rank
        better = self.backlog.tokens_of(self._upto[rank])
        return better + self._aged_part(better, rank)

    def ahead(self, request: Waiting) -> float:
        """Count the tokens that would be placed before this request if it came now and nothing came after it.

        These are those of better classes, and of its own class those that each tenant gets until the request's turn comes, by
        counters and weights. O(tenants waiting in the class).
        """
        rank = self._classes.get(request.request_class, self._last_class).rank
        better = self.backlog.tokens_of(one.name for one in self._settings.classes if one.rank < rank)
        accounts = self.accounts
        sums: dict[str, float] = {}
        for one in self._settings.classes:
            if one.rank == rank:
                for tenant, amount in self.backlog.tenants(one.name).items():
                    sums[tenant] = sums.get(tenant, 0.0) + amount.tokens
        own = sums.pop(request.tenant, 0.0)
        start = max(accounts.counter(request.tenant), accounts.floor)
        turn = start + self._settings.slack_tokens + own / accounts.weight(request.tenant)
        others = sum(
            min(tokens, max(turn - accounts.counter(tenant), 0.0) * accounts.weight(tenant)) for tenant, tokens in sums.items()
        )
        before = better + own + others
        return before + self._aged_part(before, rank)

    def _aged_part(self, before: float, rank: int) -> float:
        if not self._aged.queues:
            return 0.0
        worse = self.backlog.tokens_of(one.name for one in self._settings.classes if one.rank > rank)
        share = self._settings.aged_share
        return min(worse, before * share / (1.0 - share))

    # Charges.

    def place(self, request_id: str, *, uncached: float) -> Waiting:
        """Take out a request that goes to a worker now, and charge its tenant `uncached` and the predicted output.

        Raises KeyError for a request that does not wait.
        """
        entry = self.entries[request_id]
        aged = request_id in self._aged_offered
        self.remove(request_id)
        request = entry.request
        self._charge(request, self.accounts.tenant(request.tenant), self._classes[entry.class_name], uncached, aged=aged)
        return request

    def _charge(self, request: Waiting, tenant: Tenant, fair_class: FairClass, uncached: float, *, aged: bool) -> None:
        self._groups = None
        most = float(request.max_tokens * max(request.choices, 1)) if request.max_tokens > 0 else inf
        tokens = self.charged = self.accounts.place(request.id, tenant, fair_class.name, uncached=uncached, most_output=most)
        if not fair_class.always_first:
            share = self._settings.aged_share
            self._balance = self._balance - (1.0 - share) * tokens if aged else min(self._balance + share * tokens, 0.0)

    def is_fresh(self, request: Waiting, now_s: float) -> bool:
        known = self._classes.get(request.request_class)
        return known is not None and now_s < request.arrived_s + known.ageing_s < inf

    def pass_by(self, request: Waiting, *, uncached: float) -> None:
        """Charge a fresh request that is placed as it comes, while nothing waits, as `add` and `place` would."""
        tenant = self.accounts.tenant(request.tenant)
        self.accounts.visit(tenant)
        self._charge(request, tenant, self._classes[request.request_class], uncached, aged=False)

    def unplace(self, request: Waiting, *, tokens: float | None = None) -> None:
        """Take back the charge of a placement that did not happen, and let the request wait again in its old place."""
        self.settle(request.id, uncached=0.0, output=0.0, complete=False)
        self.add(request, tokens=tokens)

    def charge(self, tenant: str, tokens: float) -> None:
        """Charge tokens that another router placed. Negative amounts take back."""
        self.accounts.charge(self.accounts.tenant(tenant), tokens)
        self._groups = None

    def correct(self, request_id: str, *, uncached: float | None = None, output: float | None = None) -> bool:
        """Replace predictions by measured figures. Return whether a charge of this request is known here."""
        self._groups = None
        return self.accounts.correct(request_id, uncached=uncached, output=output)

    def settle(
        self, request_id: str, *, uncached: float | None = None, output: float | None = None, complete: bool = True
    ) -> bool:
        """Settle the charge of a placed request that has ended with this many output tokens (None = as predicted).

        An answer that was cut short is not `complete`, and the length of answers is not learnt from it. Return whether a charge
        of this request was known here.
        """
        self._groups = None
        return self.accounts.settle(request_id, uncached=uncached, output=output, complete=complete)
