"""Cost of placing a request on a worker: the predicted time to first token, and the delay of other requests.

For request r and worker w, in seconds:

    wait(w)       = prefill tokens before it / speed(w) + until a slot is free
    service(r, w) = uncached(r, w) / speed(w) + one step's base and decode time, and the decode time of the steps it takes
    cost(r, w)    = wait(w) + service(r, w) × (1 + thrift + congestion × other waiting requests per worker)
    choice(r, w)  = cost(r, w) + service(r, w) × (unevenness(w) − 1 + disturbance × requests running on w)

*Congestion.* Prefill that could have been saved delays all that wait; so the more wait, the more a cached prefix is worth
compared with an idle worker.  With an empty queue only the thrift is left, and the cost is close to the predicted time to first
token: of two workers that would start a request at about the same time, the one that has to compute less gets it.

*Disturbance.* An engine that computes a prompt keeps all that it decodes waiting meanwhile; so of workers that have room the
one with fewer running requests is preferred, by what they would lose.

*Unevenness.* (1 + balance × excess of recent tokens) × (1 + 2 balance × excess of recent requests), the excess over the mean
of all workers, as a fraction.  Every prompt shares its first blocks with all others, so longest prefix alone would send all to
one worker; and caches that are filled at the same pace together act like one large LRU cache.  While requests wait, the queues
balance by themselves, so this decides only between workers that have room and is no reason to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, inf, tanh
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.router.index.types import NO_OVERLAP, Overlap, Tier
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.transfer import PrefillPool, PrefillView
from headrace.router.placement.types import Waiting
from headrace.router.placement.worker_view import Bools, Floats, Ints, WorkerView, eligible_columns, session_column

FEW = 3.0
STEP_TOKENS = 8192  # of a worker that does not say how large its steps are


class RecentWork:
    """Keeps the shares of recent requests and uncached tokens per worker, in an exponential window of `horizon` requests."""

    def __init__(self, horizon: float) -> None:
        self._fade = 1.0 - 1.0 / max(horizon, 1.0)
        self._scale = 1.0
        self._tokens: dict[str, float] = {}
        self._requests: dict[str, float] = {}
        self.touched: set[str] = set()  # workers whose sums have changed

    def add(self, worker: str, tokens: float) -> None:
        """Count new work. It weighs ever more, instead of old work less: the same ratios, and one operation per request."""
        self._scale /= self._fade
        self._tokens[worker] = self._tokens.get(worker, 0.0) + tokens * self._scale
        self._requests[worker] = self._requests.get(worker, 0.0) + self._scale
        self.touched.add(worker)
        if self._scale > 1e100:
            for sums in (self._tokens, self._requests):
                for name in sums:
                    sums[name] /= self._scale
            self.touched.update(self._tokens)
            self._scale = 1.0

    def remove(self, worker: str) -> None:
        self._tokens.pop(worker, None)
        self._requests.pop(worker, None)
        self.touched.discard(worker)

    def join(self, worker: str, others: list[str]) -> None:
        """Assume that a new worker has had its share: otherwise all requests would go there until it has caught up."""
        if others:
            self._tokens[worker] = sum(self._tokens.get(name, 0.0) for name in others) / len(others)
            self._requests[worker] = sum(self._requests.get(name, 0.0) for name in others) / len(others)

    def share(self, worker: str) -> tuple[float, float]:
        return self._tokens.get(worker, 0.0), self._requests.get(worker, 0.0)

    @property
    def scale(self) -> float:
        return self._scale

    def unevenness(self, workers: Sequence[str], strength: float) -> list[float]:
        if strength <= 0 or len(workers) < 2:
            return [1.0] * len(workers)
        # A few requests more than the others are no unevenness yet.
        # Sums are exact, so that they are the same in whatever order.
        tokens_each = max(fsum(self._tokens.values()) / (fsum(self._requests.values()) or 1.0), 1.0)
        # Requests count twice: their tokens even out by themselves as caches fill, their number does not.
        # Plain floats: for the usual few workers a dozen array operations cost several times as much.
        factor = [1.0] * len(workers)
        for sums, unit, weight in ((self._tokens, FEW * tokens_each, strength), (self._requests, FEW, 2 * strength)):
            share = [sums.get(name, 0.0) / self._scale for name in workers]
            mean = fsum(share) / len(share)
            for column, own in enumerate(share):
                if own > mean:
                    factor[column] *= 1.0 + weight * (own - mean) / (mean + unit)
        return factor


def lookahead_tokens(load: WorkerLoad, settings: SchedulerSettings) -> float:
    return max(settings.lookahead * load.info.step_tokens, settings.lookahead_s * load.speed.prefill_tokens_per_s)


def has_room(load: WorkerLoad, settings: SchedulerSettings, now_s: float, pending: float | None = None) -> bool:
    """Return whether a worker may get anything now. KV blocks are compared per request. `pending`: its tokens, if known."""
    if settings.binding == "early":
        return not load.info.draining
    if not load.takes_one_more(settings.spare_slots, settings.lookahead_s):
        return False
    return (load.pending_tokens(now_s) if pending is None else pending) < lookahead_tokens(load, settings)


def batch_lookahead_tokens(load: WorkerLoad, settings: SchedulerSettings, *, alone: bool) -> float:
    """Return the pending prefill of a worker, in tokens, below which it may get a batch request.

    `alone`: no interactive request is there or due, which would have to wait for that.
    """
    if alone:
        return lookahead_tokens(load, settings)
    return settings.batch_lookahead_s * load.speed.prefill_tokens_per_s


def has_batch_room(load: WorkerLoad, settings: SchedulerSettings, pending: float, *, alone: bool) -> bool:
    """Return whether a worker may get a batch request now: it has little to prefill, and keeps some slots free."""
    return load.takes_batch(settings.batch_reserve) and pending < batch_lookahead_tokens(load, settings, alone=alone)


def make_worker_view(
    loads: LoadTable,
    settings: SchedulerSettings,
    recent: RecentWork,
    now_s: float,
    *,
    prefill: PrefillView | None = None,
    awaited: Callable[[str], int] | None = None,
    batch_alone: bool | None = None,
) -> WorkerView:
    """Describe the workers as they are now. `awaited(worker)`: KV blocks it will need for prompts computed elsewhere.

    `batch_alone`: None, as interactive requests see them; else as batch requests do, which get only what those leave, and
    whether there are none of those.
    """
    batch = batch_alone is not None
    pending, waits, token_s, step_s, blocks, running, room, disturbed = [], [], [], [], [], [], [], []
    for load in loads.ordered:
        speed, info = load.speed, load.info
        tokens, rate, busy = load.pending_tokens(now_s), speed.prefill_tokens_per_s, load.running
        pending.append(tokens)
        running.append(busy)
        waits.append(tokens / rate + (load.slot_wait_s(batch=batch) if busy >= info.slots or load.on_trial else 0.0))
        decode_s = speed.per_decode_s * busy
        token_s.append(1.0 / rate + decode_s / (info.step_tokens or STEP_TOKENS))
        step_s.append(speed.base_s + decode_s)
        free = load.blocks_free(batch=batch) if busy else inf  # an empty worker takes anything
        if batch:
            free -= settings.batch_reserve * info.blocks
        blocks.append(free if awaited is None else free - awaited(info.worker))
        if batch_alone is None:
            room.append(has_room(load, settings, now_s, tokens))
        else:
            room.append(has_batch_room(load, settings, tokens, alone=batch_alone))
        disturbed.append(settings.disturbance * busy)
    return WorkerView(
        all_wait_s=waits,
        all_pending=pending,
        all_token_s=token_s,
        all_step_s=step_s,
        all_room=room,
        all_blocks_free=blocks,
        all_running=running,
        all_disturbed=disturbed,
        all_unevenness=recent.unevenness(loads.names, settings.balance),
        prefill=prefill,
    )


# Cost matrix of the waiting requests, as arrays: a row per request, a column per worker.
#
# It is kept current as overlaps change, so that a decision is a few operations on whole arrays and looks nothing up.

_FIRST_ROWS = 64


@dataclass(slots=True)
class CostRow:
    request: Waiting
    number: int
    overlaps: Mapping[str, Overlap]
    session: int = -1  # the column its session belongs to
    ineligible_since_s: float | None = None  # no worker may take it, since then
    blocks: float = 0.0  # KV blocks it will need beside those that are cached, about


def uncached_tokens(request: Waiting, overlap: Overlap, tiers: Mapping[Tier, float]) -> float:
    """Prompt tokens to be computed, with loading a block from a slower tier counted as the part of computing it that it does
    not save. At least one: the last token is always computed."""
    saved = overlap.device * tiers.get("device", 1.0)
    saved += overlap.host * tiers.get("host", 0.0) + overlap.disk * tiers.get("disk", 0.0)
    return max(request.tokens - saved * request.block_size, 1.0)


def blocks_needed(request: Waiting) -> float:
    return (request.tokens + min(request.max_tokens, 256)) / request.block_size if request.block_size else 0.0


class CostMatrix:
    """Rows of waiting requests. `loads` gives the columns, `prefill` those of `remote`."""

    def __init__(self, loads: LoadTable, prefill: PrefillPool, tiers: Mapping[Tier, float]) -> None:
        self._loads = loads
        self._prefill = prefill
        self._tiers = tiers
        self.rows: dict[str, CostRow] = {}
        self._free: list[int] = []
        self.uncached: Floats = np.zeros((0, 0))
        self.work: Floats = np.zeros((0, 0))  # uncached, times the factor of preferred labels
        self.remote: Floats = np.zeros((0, 0))  # tokens that each prefill worker would compute; infinite where it cannot
        self.eligible: Bools = np.zeros((0, 0), dtype=np.bool_)
        self.arrived: Floats = np.zeros(0)
        self.deadline: Floats = np.zeros(0)
        self.priority: Floats = np.zeros(0)
        self.blocks: Floats = np.zeros(0)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def width(self) -> int:
        return len(self._loads.ordered)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.rows

    def add(self, request: Waiting, overlaps: Mapping[str, Overlap], now_s: float) -> CostRow:
        if not self._free:
            self._grow()
        row = CostRow(request, self._free.pop(), overlaps)
        self.rows[request.id] = row
        n = row.number
        self.arrived[n] = request.arrived_s
        self.deadline[n] = request.deadline_s
        self.priority[n] = request.priority
        self.blocks[n] = row.blocks = blocks_needed(request)
        self._fill(row, now_s)
        return row

    def remove(self, request_id: str) -> CostRow | None:
        row = self.rows.pop(request_id, None)
        if row is not None:
            self._free.append(row.number)
        return row

    def refresh(
        self, request_id: str, overlaps: Mapping[str, Overlap], changed: Collection[str] | None = None
    ) -> CostRow | None:
        """Update the row of a request whose overlaps have changed. `changed`: for these workers; None = for any."""
        row = self.rows.get(request_id)
        if row is None:
            return None
        row.overlaps = overlaps
        if row.request.prefer or changed is None:
            self._fill_work(row)
            return row
        request, n = row.request, row.number
        for worker in changed:
            self._set(n, worker, request, overlaps.get(worker, NO_OVERLAP))
        return row

    def _set(self, n: int, worker: str, request: Waiting, overlap: Overlap) -> None:
        load = self._loads.get(worker)
        if load is not None:
            tokens = uncached_tokens(request, load.info.whole(overlap), self._tiers)
            self.uncached[n, load.column] = self.work[n, load.column] = tokens
        elif (other := self._prefill.get(worker)) is not None and self.remote[n, other.column] < np.inf:
            self.remote[n, other.column] = uncached_tokens(request, other.info.whole(overlap), self._tiers)

    def columns_changed(self, now_s: float) -> None:
        rows, width = len(self.arrived), len(self._loads)
        self.uncached = np.ones((rows, width))
        self.remote = np.ones((rows, len(self._prefill)))
        self.work = np.ones((rows, width))
        self.eligible = np.zeros((rows, width), dtype=np.bool_)
        for row in self.rows.values():
            self._fill(row, now_s)

    def same_fleet(self, column: int, other: int) -> bool:
        return self._loads.ordered[column].info.fleet == self._loads.ordered[other].info.fleet

    def numbers(self, requests: Sequence[Waiting]) -> Ints:
        rows = self.rows
        return np.fromiter((rows[request.id].number for request in requests), dtype=np.intp, count=len(requests))

    # Parts.

    def _fill(self, row: CostRow, now_s: float) -> None:
        columns = eligible_columns(row.request, self._loads)
        row.session = -1
        if row.request.session and columns:
            row.session = session_column(f"{row.request.tenant}\0{row.request.session}", columns, self._loads)
            if row.request.affinity == "hard":
                columns = [row.session]
        everybody = len(columns) == len(self._loads.ordered)
        self.eligible[row.number] = everybody
        if columns:
            if not everybody:
                self.eligible[row.number, columns] = True
            row.ineligible_since_s = None
        elif row.ineligible_since_s is None:
            row.ineligible_since_s = now_s
        self._fill_work(row)

    def _fill_remote(self, row: CostRow) -> None:
        request, n = row.request, row.number
        fleet = request.prefill_fleet
        if fleet and all(load.info.fleet != fleet for load in self._prefill):
            fleet = ""  # preferred, no filter
        for load in self._prefill:
            able = not request.adapter or request.adapter in load.info.adapters
            able = able and (not fleet or load.info.fleet == fleet)
            overlap = load.info.whole(row.overlaps.get(load.info.worker, NO_OVERLAP))
            self.remote[n, load.column] = uncached_tokens(request, overlap, self._tiers) if able else np.inf

    def _fill_work(self, row: CostRow) -> None:
        request, tiers, n = row.request, self._tiers, row.number
        uncached = self.uncached[n]
        uncached[:] = max(request.tokens, 1.0)
        tokens: dict[Overlap, float] = {}  # many workers have the same part of it
        for worker, overlap in row.overlaps.items():
            load = self._loads.get(worker)
            if load is not None:
                overlap = load.info.whole(overlap)
                found = tokens.get(overlap)
                if found is None:
                    found = tokens[overlap] = uncached_tokens(request, overlap, tiers)
                uncached[load.column] = found
        self.work[n] = uncached
        if self._prefill.ordered:
            self._fill_remote(row)
        if request.prefer:
            for load in self._loads:
                liking = sum(weight for label, weight in request.prefer.items() if label in load.info.labels)
                if liking:
                    self.work[n, load.column] *= 2.718281828 ** -tanh(liking)

    def _grow(self) -> None:
        before = len(self.arrived)
        after = max(_FIRST_ROWS, before * 2)
        width = len(self._loads)
        self.uncached = _longer(self.uncached, (after, width))
        self.work = _longer(self.work, (after, width))
        self.remote = _longer(self.remote, (after, len(self._prefill)))
        self.eligible = _longer(self.eligible, (after, width))
        for name in ("arrived", "deadline", "priority", "blocks"):
            setattr(self, name, _longer(getattr(self, name), (after,)))
        self._free.extend(range(after - 1, before - 1, -1))


def _longer(array: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    longer = np.zeros(shape, dtype=array.dtype)
    if array.size and array.shape[1:] == shape[1:]:
        longer[: len(array)] = array
    return longer
