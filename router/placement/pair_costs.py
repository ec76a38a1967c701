"""Costs of some requests on each worker, by the better of two ways: the prompt computed there, or by a prefill worker.

Without prefill workers there is only the first way, and the second costs no time here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace.router.placement.cost import CostMatrix
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.transfer import PrefillView, ahead_s, burden_s, computing, disturbs
from headrace.router.placement.worker_view import Bools, Floats, Ints, WorkerView


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
