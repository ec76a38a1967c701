"""Inputs and outputs of the scheduler. Times are seconds of one monotonic (or virtual) clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headrace.broker.messages.control import Candidate, FleetDecision
from headrace.broker.messages.members import HELPERS
from headrace.broker.messages.requests import PrefillDecision
from headrace.jetstream.subjects import BATCH_CLASSES
from headrace.router.index.types import Overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A place, as its worker's lease describes it: a worker, or one data-parallel rank of it (`headrace.broker.places`)."""

    worker: str  # of a rank `<worker>~<rank>`; so wherever a router names a worker
    slots: int
    blocks: int = 0  # KV blocks it has in all, 0 = unknown
    block_size: int = 0
    pool_blocks: int = 1  # of the pool, in each of its own: a part of one is of no use to its engine
    step_tokens: int = 0  # most tokens of one engine step, 0 = unknown
    draining: bool = False
    waking: bool = False  # it is draining, but about to serve again
    labels: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()
    kv_events: bool = True
    epoch: int = 0
    start_s: float = 0.0  # from the start of its process until it could serve, 0 = unknown
    zone: str = ""  # where its machine is; empty = unknown
    fleet: str = ""
    price: float = 0.0
    context: int = 0  # most tokens of prompt and answer together, 0 = unknown
    role: str = "aggregated"  # `prefill` owns no requests, `decode` may have its prompts computed by those that do only that
    handover: str = ""  # workers with equal words can hand KV blocks over; empty = not at all

    def whole(self, overlap: Overlap) -> Overlap:
        """Return what of an overlap, in blocks of the pool, is of use: whole blocks of its engine."""
        each = self.pool_blocks
        if each == 1 or not overlap.blocks:
            return overlap
        device = overlap.device // each * each
        host = (overlap.device + overlap.host) // each * each - device
        return Overlap(device, host, overlap.blocks // each * each - device - host)

    @property
    def serves(self) -> bool:
        return self.role not in HELPERS

    @property
    def takes_handovers(self) -> bool:
        return self.role == "decode" and bool(self.handover)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A request in the scheduling window. `key` is the caller's own handle (its delivery) and comes back with the decision."""

    id: str
    key: object = None
    name: str = ""  # the client's own id of it
    attempt: int = 1
    tokens: int
    max_tokens: int = 0
    choices: int = 1
    chain: Sequence[int] = ()  # block chain values; empty = no affinity
    block_size: int = 0
    request_class: str = "std"
    tenant: str = "_"
    priority: int = 0  # lower is sooner, inside a class
    arrived_s: float = 0.0  # at its frontend
    entered_s: float | None = None  # into this window: later than `arrived_s` if it was moved; None = when it arrived
    deadline_s: float = float("inf")
    adapter: str = ""
    session: str = ""
    affinity: Literal["soft", "hard"] = "soft"
    worker: str = ""  # directed to exactly this one
    ttft_target_s: float | None = None  # None = the default
    itl_target_s: float | None = None
    agent_priority: int | None = None
    failures: int = 0  # workers that it was moved away from because they failed
    prefill_fleet: str = ""  # the fleet whose prefill workers are to compute its prompt; empty = any
    require: frozenset[str] = frozenset()
    prefer: Mapping[str, float] = field(default_factory=dict)
    suspect: bool = False  # by its history it may crash workers; its judge says whether it is a suspect

    @property
    def longest(self) -> int:
        """Most tokens of prompt and one answer together."""
        return self.tokens + max(self.max_tokens, 1)

    @property
    def batch(self) -> bool:
        return self.request_class in BATCH_CLASSES

    def age_s(self, now_s: float) -> float:
        return max(now_s - self.arrived_s, 0.0)

    def waited_s(self, now_s: float) -> float:
        return max(now_s - (self.arrived_s if self.entered_s is None else self.entered_s), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    request: Waiting
    worker: str
    uncached: int  # tokens to be prefilled, predicted
    new_blocks: Sequence[int]  # chain values the worker will hold and does not yet
    predicted_ttft_s: float  # from arrival
    waited_s: float  # in the window
    reason: str  # metric label: prefix, load, session, direct, only, policy, trial, …
    candidates: Sequence[Candidate] = ()
    prefill: PrefillDecision | None = None  # where its prompt is computed; None in a pool where that is no question
    limit: int = 0  # of a suspect: its group limit
    crashes: int = 0
    kept: bool = False  # the worker may not preempt it
    fleet: FleetDecision | None = None  # None in a pool with one fleet

    @property
    def remote(self) -> bool:
        return self.prefill is not None and self.prefill.remote


@dataclass(frozen=True, slots=True, kw_only=True)
class Shed:
    """A decision to end this request now. `code` is the machine-readable reason.

    Codes are queue_full, tenant_limit, class_limit, deadline_hopeless, deadline, no_eligible_worker and no_prefill_worker.
    """

    request: Waiting
    code: str
    message: str
    retry_after_s: float | None = None


Decision = Placement | Shed
