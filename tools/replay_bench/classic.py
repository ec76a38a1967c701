"""The policy `classic`: the common way of KV-aware routers, to compare with.

Source: the cost function of NVIDIA Dynamo 1.6 (`lib/kv-router/src/scheduling/selector.rs`), device tier only, temperature 0:

    cost(w) = scale * max((active prefill tokens(w) + prompt tokens) / block size - credit * overlap blocks(w), 0)
              + potential decode blocks(w)

Lowest wins, ties at random. *Active prefill tokens* are the uncached tokens of all that was sent to `w` and has not finished
its prefill, so what queues there counts; *potential decode blocks* are the different blocks of all requests on `w`, this one
included. It binds early: a request goes to its worker when it arrives. Blocks of a placed request count for its worker at once
(`predict`), which can only help it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.broker.codec import unpack_u64
from headrace.broker.messages.events import JobEvent, LoadReport
from headrace.router.index.types import NO_OVERLAP, CacheView
from headrace.router.placement.types import Decision, Placement, Shed, Waiting, WorkerInfo


class Scheduling(Protocol):
    """The methods of `headrace.router.placement.scheduler.Scheduler` that the world calls."""

    def set_routers(self, names: Iterable[str]) -> None: ...

    def put_worker(self, info: WorkerInfo, now_s: float) -> None: ...

    def on_report(self, report: LoadReport, now_s: float) -> None: ...

    def on_event(self, event: JobEvent, now_s: float) -> None: ...

    def offer(self, request: Waiting, now_s: float) -> Shed | None: ...

    def decide(self, now_s: float) -> list[Decision]: ...

    def next_wake_s(self, now_s: float) -> float | None: ...

    @property
    def waiting(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A scheduler, its view of the caches, and its name in `placed` events."""

    name: str
    scheduler: Scheduling
    view: CacheView


MakeRouter = Callable[[str, int], Router]
"""(name, seed) → a router without workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicWeights:
    """Weights of `classic`: `scale` of prefill against decode load (`prefill_load_scale`), `credit` of the overlap
    (`overlap_score_credit`)."""

    scale: float = 1.0
    credit: float = 1.0

    def __str__(self) -> str:
        return f"scale {self.scale:g}, credit {self.credit:g}"


SCALES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
SWEEP = tuple(ClassicWeights(scale=scale) for scale in SCALES)
"""The weights that are tried in the search for the best. The documented range of the credit ends at 1."""

WIDE_SWEEP = tuple(ClassicWeights(scale=scale, credit=credit) for scale in SCALES for credit in (1.0, 1.5, 2.0, 3.0))
"""The same with credits beyond that range, which count a cached block as worth more than its computation."""


@dataclass(slots=True)
class _Load:
    prefill_tokens: int = 0
    blocks: Counter[int] = field(default_factory=Counter)  # block → requests that use it
    others: int = 0  # blocks of requests whose hashes are not known here


@dataclass(slots=True)
class _Active:
    worker: str
    uncached: int  # 0 once prefilled
    chain: tuple[int, ...] = ()
    unknown: int = 0


class Classic:
    """Decides at arrival. Has the methods of `headrace.router.placement.scheduler.Scheduler` that a replay needs."""

    least_uncached = 1  # tokens of a request that count as queued

    def __init__(self, view: CacheView, *, weights: ClassicWeights | None = None, name: str = "", seed: int = 0) -> None:
        self._view = view
        self._weights = weights or ClassicWeights()
        self._name = name
        self._rng = random.Random(f"classic {seed}")  # noqa: S311 - reproducible, not secret
        self._workers: dict[str, _Load] = {}
        self._block_size = 1
        self._active: dict[str, _Active] = {}
        self._new: list[Waiting] = []

    @property
    def waiting(self) -> int:
        return len(self._new)

    def set_routers(self, names: Iterable[str]) -> None:
        """Ignore the other routers, except for their placements."""

    def put_worker(self, info: WorkerInfo, now_s: float) -> None:
        self._workers.setdefault(info.worker, _Load())
        self._block_size = info.block_size or self._block_size

    def on_report(self, report: LoadReport, now_s: float) -> None:
        """Ignore reports: only requests sent and ended count."""

    def on_event(self, event: JobEvent, now_s: float) -> None:
        if event.kind == "placed" and event.by != self._name:
            chain = unpack_u64(event.hashes)
            self._add(
                event.id,
                _Active(event.worker, event.uncached, tuple(chain), max(0, event.blocks - len(chain))),
            )
            if event.worker in self._workers:
                self._view.predict(event.worker, chain, now_s=now_s)
        elif event.kind == "prefilled":
            self._prefilled(event.id)
        elif event.kind == "settled":
            self._settled(event.id)

    def offer(self, request: Waiting, now_s: float) -> Shed | None:
        self._new.append(request)
        return None

    def decide(self, now_s: float) -> list[Decision]:
        self._view.expire(now_s)
        new, self._new = self._new, []
        return [self._place(request, now_s) for request in new]

    def next_wake_s(self, now_s: float) -> float | None:
        return None

    def _place(self, request: Waiting, now_s: float) -> Placement:
        chain = tuple(request.chain)
        self._view.track(request.id, chain)
        overlaps = self._view.overlaps(request.id)
        held_by = {worker: overlaps.get(worker, NO_OVERLAP).blocks for worker in self._workers}
        worker = self.choose(request, held_by)
        held = held_by[worker]
        self._view.untrack(request.id)
        uncached = max(request.tokens - held * self._block_size, self.least_uncached)
        self._add(request.id, _Active(worker, uncached, chain))
        self.predict(worker, chain, now_s)
        return Placement(
            request=request,
            worker=worker,
            uncached=uncached,
            new_blocks=chain[held:],
            predicted_ttft_s=0.0,  # this policy predicts no times
            waited_s=now_s - request.arrived_s,
            reason="policy",
        )

    def choose(self, request: Waiting, held: Mapping[str, int]) -> str:
        best: list[str] = []
        lowest = float("inf")
        for worker, load in self._workers.items():
            cost = self._cost(request, load, held[worker])
            if cost < lowest:
                best, lowest = [worker], cost
            elif cost == lowest:
                best.append(worker)
        return self._rng.choice(best)

    def predict(self, worker: str, chain: Sequence[int], now_s: float) -> None:
        """Count the blocks of a placed request for its worker at once."""
        self._view.predict(worker, chain, now_s=now_s)

    def _cost(self, request: Waiting, load: _Load, held: int) -> float:
        prefill = (load.prefill_tokens + request.tokens) / self._block_size - self._weights.credit * held
        blocks = load.blocks
        decode = len(blocks) + load.others + sum(1 for block in request.chain if block not in blocks)
        return self._weights.scale * max(prefill, 0.0) + decode

    def _add(self, request_id: str, active: _Active) -> None:
        load = self._workers.get(active.worker)
        if load is None:
            return
        self._active[request_id] = active
        load.prefill_tokens += active.uncached
        load.blocks.update(active.chain)
        load.others += active.unknown

    def _prefilled(self, request_id: str) -> None:
        active = self._active.get(request_id)
        if active is not None:
            self._workers[active.worker].prefill_tokens -= active.uncached
            active.uncached = 0

    def _settled(self, request_id: str) -> None:
        self._prefilled(request_id)
        active = self._active.pop(request_id, None)
        if active is None:
            return
        load = self._workers[active.worker]
        load.others -= active.unknown
        for block in active.chain:
            if load.blocks[block] == 1:
                del load.blocks[block]
            else:
                load.blocks[block] -= 1
