"""Defines what the planner sees of a pool at one time. What is not known is None and never 0."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

ROLES: tuple[str, ...] = ("aggregated", "prefill", "decode")
SightState = Literal["serving", "draining", "asleep", "waking", "paused"]

LEAST_SEEN = 0.5  # of the serving workers: with fewer fresh reports the load of a pool is unknown


class WorkerSight(msgspec.Struct, frozen=True, kw_only=True):
    """A worker and its last load report. `report_age_s` None: it has reported nothing yet.

    `roles`: those that it can change to.
    """

    worker: str
    role: str
    state: SightState = "serving"
    roles: tuple[str, ...] = ()
    slots: int = 0
    running: int = 0
    waiting: int = 0
    kv_used: float | None = None  # share of its KV blocks
    kv_tokens: int = 0  # tokens that its KV blocks hold, 0 = unknown
    queued_prefill_tokens: int = 0
    report_age_s: float | None = None
    start_s: float = 0.0  # its own start-up took so long, 0 = unknown

    @property
    def held(self) -> int:
        """Requests that it would have to finish or hand over."""
        return self.running + self.waiting


class StepSight(msgspec.Struct, frozen=True, kw_only=True):
    """An engine step as a load report tells of it. `context_tokens`: tokens in its KV blocks."""

    step_s: float
    prefill_tokens: int
    decodes: int
    context_tokens: int = 0


class RequestSight(msgspec.Struct, frozen=True, kw_only=True):
    """A placed request: tokens of its prompt, those that had to be computed, and how long it had waited."""

    prompt: int
    uncached: int
    waited_s: float = 0.0


class OutcomeSight(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has ended: from its arrival to its first token, and the mean time between its tokens."""

    ttft_s: float
    itl_s: float = 0.0


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of a model at one time (Unix). The key of all state is (model, pool).

    `arrived`: requests that arrived since the last observation, those refused at the queue's cap included. `waiting`: requests
    that are stored and not placed, those in routers' windows included. `backlog`: batch work, (seconds until due, requests).
    """

    at: float
    model: str
    pool: str
    arrived: int | None = None
    refused: int = 0
    waiting: int | None = None
    workers: tuple[WorkerSight, ...] | None = None
    placed: tuple[RequestSight, ...] = ()
    outputs: tuple[int, ...] = ()  # tokens of answers that ended since the last observation
    ended: tuple[OutcomeSight, ...] = ()  # requests that ended since the last observation, as far as their times are known
    steps: tuple[StepSight, ...] = ()
    backlog: tuple[tuple[float, int], ...] = ()
    price: float = 0.0  # of one worker for an hour, 0 = not given

    def of_role(self, role: str, *states: SightState) -> list[WorkerSight]:
        """Return the workers of a role that are in one of these states, `serving` if none is named."""
        wanted = states or ("serving",)
        return [one for one in self.workers or () if one.role == role and one.state in wanted]


def stale(workers: Iterable[WorkerSight], *, fresh_s: float) -> bool:
    """Return True if too few of the serving workers have reported lately to decide anything by their load.

    A worker that has never reported has just joined: it counts as supply, and says nothing.
    """
    known = [one for one in workers if one.state == "serving" and one.report_age_s is not None]
    fresh = [one for one in known if one.report_age_s is not None and one.report_age_s <= fresh_s]
    return bool(known) and len(fresh) < LEAST_SEEN * len(known)
