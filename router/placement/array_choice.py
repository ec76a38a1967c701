"""The choice of `KvPolicy` for many requests or workers, in few operations on whole arrays.

What a request would cost is computed for all workers, because one without room may be worth waiting for; preference only for
those that have room, which are few while much waits.  The choice is that of `KvPolicy` with all costs (`array_costs.py`) to the
last bit: `tests/unit/router/placement/test_scalar_choice.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace.router.placement.cost import CostMatrix
from headrace.router.placement.scalar_choice import DEADLINE_MARGIN_S, OUT_OF_TURN_S, PRIORITY_S, ScalarChoice
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.transfer import PrefillView, ahead_s, burden_s, computing, disturbs
from headrace.router.placement.types import Waiting
from headrace.router.placement.worker_view import Bools, Floats, Ints, WorkerView


def applies(workers: WorkerView, settings: SchedulerSettings) -> bool:
    """Return whether `choose` may be used: no prefill workers, and no temperature."""
    return workers.prefill is None and settings.temperature <= 0


def choose(
    group: Sequence[Waiting],
    window: CostMatrix,
    workers: WorkerView,
    congestion: float,
    now_s: float,
    settings: SchedulerSettings,
) -> ScalarChoice:
    """Choose a request and its worker exactly as `KvPolicy.pick` does with all costs."""
    roomy = np.flatnonzero(workers.room)
    if not len(roomy):
        return ScalarChoice()
    rows = window.numbers(group)
    every = np.arange(len(rows))
    blocks, eligible = window.blocks[rows], window.eligible[rows]
    service, cost = window.spare(len(rows))
    np.take(window.work, rows, axis=0, out=service, mode="clip")  # which needs no copy of `out`; no row is beyond the end
    service *= workers.token_s
    service += workers.step_s
    np.multiply(service, 1.0 + congestion, out=cost)
    cost += workers.wait_s
    anywhere = bool(eligible.all())
    if not anywhere:
        cost[~eligible] = np.inf
    best = cost.argmin(axis=1)
    choice = _preferences(cost, service, roomy, workers)
    fits = bool(blocks.max() <= workers.blocks_free[roomy].min())
    if not (anywhere and fits):  # seldom, and each look at all pairs counts
        free = eligible[:, roomy] & (blocks[:, None] <= workers.blocks_free[roomy])
        choice[~free] = np.inf
    mine = choice.argmin(axis=1)
    possible = np.isfinite(choice[every, mine])
    column = roomy[mine]
    here = cost[every, column]
    age = now_s - window.arrived[rows]
    aged = (age > settings.max_wait_s) | (window.deadline[rows] - now_s < here + DEADLINE_MARGIN_S)
    open_ = workers.room[best] & eligible[every, best] & (blocks <= workers.blocks_free[best])
    waits = ~open_ & (cost[every, best] < here - 1e-9) & ~aged
    passed_up = bool((possible & waits).any())
    possible &= ~waits
    if not possible.any():
        return ScalarChoice(passed_up=passed_up)
    score = window.work[rows, column] * workers.token_s[column] - settings.ageing * age
    score += window.priority[rows] * PRIORITY_S
    score[aged] -= OUT_OF_TURN_S + age[aged]
    score[~possible] = np.inf
    at = int(score.argmin())
    return ScalarChoice(at, int(column[at]), float(here[at]), bool(aged[at]), passed_up)


def _preferences(cost: Floats, service: Floats, roomy: Ints, workers: WorkerView) -> Floats:
    if len(roomy) == cost.shape[1]:  # then nothing has to be copied
        preferred = service
    else:
        preferred, cost = service[:, roomy], cost[:, roomy]
    preferred *= workers.unevenness[roomy] - 1.0 + workers.disturbed[roomy]
    preferred += cost
    return preferred


# Costs of some requests on each worker, by the better of two ways: the prompt computed there, or by a prefill worker.
#
# Without prefill workers there is only the first way, and the second costs no time here.


@dataclass(slots=True)
class Costs:
    """Costs per candidate (row) and worker (column); infinite where the worker may not take it."""

    cost: Floats  # by the best way, whether or not there is room for it
    choice: Floats
    free: Bools  # eligible, and there is room now
    here: Floats  # by the way that would be gone now
    open: Bools  # there is room for the best way
    ttft: Floats  # seconds from now to the first token, by the best way; infinite where the worker may not take it
    service: Floats  # seconds of that in which the worker computes, if it computes the prompt itself
    remote: Bools | None = None  # the way that would be gone now is a prompt computed by a prefill worker
    work_s: Floats | None = None  # seconds of computing on that way


def costs(window: CostMatrix, rows: Ints, workers: WorkerView, congestion: float, settings: SchedulerSettings) -> Costs:
    service = window.work[rows] * workers.token_s + workers.step_s
    eligible = window.eligible[rows]
    fits = eligible & (window.blocks[rows][:, None] <= workers.blocks_free)
    if workers.prefill is None:
        cost = np.where(eligible, workers.wait_s + service * (1.0 + congestion), np.inf)
        free = fits & workers.room
        ttft = np.where(eligible, workers.wait_s + service, np.inf)
        return Costs(cost, cost + service * (workers.unevenness - 1.0 + workers.disturbed), free, cost, free, ttft, service)
    return _both_ways(window, rows, workers, workers.prefill, congestion, settings, _Local(service, fits))


class _Local(NamedTuple):
    service: Floats
    fits: Bools


def _both_ways(
    window: CostMatrix,
    rows: Ints,
    workers: WorkerView,
    side: PrefillView,
    congestion: float,
    settings: SchedulerSettings,
    local_way: _Local,
) -> Costs:
    service, fits = local_way
    work, uncached, eligible = window.work[rows], window.uncached[rows], window.eligible[rows]
    remote, remote_here, remote_work = _remote(window, rows, side, congestion, settings)
    remote = np.where(eligible, remote, np.inf)
    bearable = disturbs(work, side) & (remote <= settings.prefill_bearable_s)
    local_ok = eligible & ~_must_be_remote(uncached, side, settings) & ~bearable
    burden = burden_s(work, side)
    local = np.where(local_ok, workers.wait_s + service + burden + congestion * side.price_s * work, np.inf)
    local_free = fits & local_ok & workers.room
    remote_free = fits & side.takes & np.isfinite(remote_here)
    # What is preferred among workers is the same on both ways, but that only one of them disturbs.
    taste = service * (workers.unevenness - 1.0) + side.joining_s
    local_choice = np.where(local_free, local + taste + service * workers.disturbed, np.inf)
    remote_choice = np.where(remote_free, remote_here + taste, np.inf)
    away = remote_choice < local_choice
    cost = np.minimum(local, remote)
    open_ = (local_free & (local <= cost)) | (remote_free & (remote_here <= cost))
    return Costs(
        cost=cost,
        choice=np.where(away, remote_choice, local_choice),
        free=local_free | remote_free,
        here=np.where(away, remote_here, local),
        open=open_,
        ttft=np.minimum(
            np.where(local_ok, workers.wait_s + service, np.inf), _least_remote(window, rows, side, eligible, settings)
        ),
        service=service,
        remote=away,
        work_s=np.where(away, remote_work, work * workers.token_s),
    )


def _least_remote(window: CostMatrix, rows: Ints, side: PrefillView, eligible: Bools, settings: SchedulerSettings) -> Floats:
    """Predict the time to first token by the best prefill worker, without what the prompt costs others."""
    remote, _, _ = _remote(window, rows, side, 0.0, settings)
    return np.where(eligible, remote, np.inf)


def _must_be_remote(uncached: Floats, side: PrefillView, settings: SchedulerSettings) -> Bools:
    """Mark the workers that may not compute a prompt: with `always`, and while it waits for a prefill worker to be ready."""
    refused = np.zeros(uncached.shape, dtype=np.bool_)
    if settings.prefill == "always":
        refused |= side.reachable
    if settings.prefill_unready != "local":
        refused |= side.bare & needs_one(uncached, settings)
    return refused


def needs_one(uncached: Floats, settings: SchedulerSettings) -> Bools:
    """Mark the prompts that are for a prefill worker, if there is one."""
    if settings.prefill == "always":
        return np.ones(uncached.shape, dtype=np.bool_)
    return uncached >= settings.prefill_min_tokens


def _remote(
    window: CostMatrix, rows: Ints, side: PrefillView, congestion: float, settings: SchedulerSettings
) -> tuple[Floats, Floats, Floats]:
    """Return, per candidate and worker: cost by the best prefill worker, by the best with room, and seconds of its work."""
    uncached, remote = window.uncached[rows], window.remote[rows]
    cost = np.full(uncached.shape, np.inf)
    here = np.full(uncached.shape, np.inf)
    work = np.zeros(uncached.shape)
    liking = window.work[rows] / uncached  # the factor of preferred labels
    for group in side.groups:
        columns = group.decode
        found = computing(remote[:, group.prefill], uncached[:, columns].min(axis=1), side, group, congestion)
        back = side.way_s + side.slot_wait_s[columns] + side.fetch_s * uncached[:, columns]
        waits = np.where(np.isfinite(found.here), 0.0, ahead_s(found.service_s, len(group.prefill)))
        possible = needs_one(uncached[:, columns], settings)
        like = liking[:, columns]
        cost[:, columns] = np.where(possible, ((found.cost + waits)[:, None] + back) * like, np.inf)
        here[:, columns] = np.where(possible, (found.here[:, None] + back) * like, np.inf)
        work[:, columns] = found.service_s[:, None]
    return cost, here, work
