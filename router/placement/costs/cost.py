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

from collections.abc import Callable, Sequence
from math import fsum, inf

from headrace.router.placement.disagg.prefill_costs import PrefillView
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.worker_view import WorkerView

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
        """Return the tokens and the requests of a worker, in units of `scale`."""
        return self._tokens.get(worker, 0.0), self._requests.get(worker, 0.0)

    @property
    def scale(self) -> float:
        return self._scale

    def unevenness(self, workers: Sequence[str], strength: float) -> list[float]:
        """Return the factor of each worker, at least 1."""
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
    """Return the pending prefill of a worker, in tokens, below which it may get more."""
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
