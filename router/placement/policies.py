"""Placement policies: the choice of a request among those whose turn it is, and of a worker among those with room.

`kv` looks at all candidates at once and may let a request wait for the worker that will start it sooner.  The other policies
take the requests in fair order and differ only in the worker they choose; they are there to compare with, and for engines
without a cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Protocol

import numpy as np
import structlog

from headrace.router.errors import SettingsInvalid
from headrace.router.placement.cost import CostMatrix, CostRow, blocks_needed
from headrace.router.placement.first_tokens import Promises
from headrace.router.placement.fleets import PREFERENCE_S, FleetChooser
from headrace.router.placement.kernel import DEADLINE_MARGIN_S, NEARLY_S, OUT_OF_TURN_S, PRIORITY_S
from headrace.router.placement.pair_costs import Costs, costs
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Waiting
from headrace.router.placement.worker_view import Floats, Ints, WorkerView, kernel

_log = structlog.get_logger(__name__)

MOST_PAIRS = 400  # of a request and a worker, and four for a request: with more, arrays are quicker than the kernel in Python


@dataclass(frozen=True, slots=True)
class Pick:
    """A choice: the `at`-th request of the group goes to the worker in this column."""

    at: int
    column: int
    cost_s: float
    aged: bool = False
    remote: bool = False  # a prefill worker computes the prompt


class Policy(Protocol):
    """The choice of one scheduler. It decides on one event loop and must not wait."""

    passed_up: bool
    """Whether in the last `pick` a request could have been placed and waits for a better worker."""

    def pick(
        self, group: Sequence[Waiting], window: CostMatrix, workers: WorkerView, congestion: float, now_s: float
    ) -> Pick | None:
        """Return the next placement, or None if no request of the group can be placed now. Called until it returns None."""
        ...


@cache
def _warn_not_compiled() -> None:
    """Warn once, however many pools a process routes."""
    _log.warning("kernel.not_compiled")


class KvPolicy:
    """Chooses by cost with cached prefixes, shortest work first with ageing, and delay scheduling.

    Delay scheduling: Zaharia et al., EuroSys 2010; here a request waits for a worker without room only while that worker is
    still predicted to start it at less cost than any that has room, and never beyond `max_wait_s`.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        rng: random.Random,
        fleets: FleetChooser | None = None,
        promises: Promises | None = None,
    ) -> None:
        self._settings = settings
        self._rng = rng
        self._fleets = fleets
        self._promises = promises
        if not kernel.COMPILED:
            _warn_not_compiled()
        self.passed_up = False  # in the last pick, a request could have been placed and waits for a better worker

    def pick(
        self, group: Sequence[Waiting], window: CostMatrix, workers: WorkerView, congestion: float, now_s: float
    ) -> Pick | None:
        settings = self._settings
        several = self._fleets is not None and self._fleets.several
        many = not kernel.COMPILED and len(group) * (window.width + 4) > MOST_PAIRS
        if several or many or self._promises or workers.prefill is not None or settings.temperature > 0:
            return self._pick_by_all_costs(group, window, workers, congestion, now_s)
        rows = [window.rows[request.id] for request in group]
        numbers = [row.number for row in rows]
        works, eligibles = kernel.rows(window.work, numbers), kernel.rows(window.eligible, numbers)
        at, column, cost_s, aged, self.passed_up = kernel.choose(
            group,
            [row.blocks for row in rows],
            works,
            eligibles,
            workers.columns(),
            congestion,
            now_s,
            settings.max_wait_s,
            settings.ageing,
        )
        return Pick(at, column, cost_s, aged) if at >= 0 else None

    def _pick_by_all_costs(
        self, group: Sequence[Waiting], window: CostMatrix, workers: WorkerView, congestion: float, now_s: float
    ) -> Pick | None:
        settings = self._settings
        rows = window.numbers(group)
        table = costs(window, rows, workers, congestion, settings)
        self._keep_promises(rows, table, window, workers, now_s)
        penalty = self._penalties(group, table, workers, now_s)
        choice = np.where(table.free, table.choice + penalty, np.inf)
        every = np.arange(len(rows))
        column = choice.argmin(axis=1)
        here = table.here[every, column]
        possible = np.isfinite(choice[every, column])
        best = (table.cost + penalty).argmin(axis=1)
        age = now_s - window.arrived[rows]
        urgent = window.deadline[rows] - now_s < here + DEADLINE_MARGIN_S
        aged = (age > settings.max_wait_s) | urgent
        ahead = (table.cost + penalty)[every, best] < (table.here + penalty)[every, column] - NEARLY_S
        waits = ~table.open[every, best] & ahead & ~aged
        self.passed_up = bool((possible & waits).any())
        possible &= ~waits
        if not possible.any():
            return None
        if table.work_s is None:
            score = window.work[rows, column] * workers.token_s[column] - settings.ageing * age
        else:
            score = table.work_s[every, column] - settings.ageing * age
        score += window.priority[rows] * PRIORITY_S
        score[aged] -= OUT_OF_TURN_S + age[aged]
        score[~possible] = np.inf
        at = int(score.argmin())
        target = self._soften(table, at, int(column[at]), penalty)
        return Pick(at, target, float(table.here[at, target]), bool(aged[at]), is_remote(table, at, target))

    def _keep_promises(self, rows: Ints, table: Costs, window: CostMatrix, workers: WorkerView, now_s: float) -> None:
        """Close workers to requests that would make another one late by its prediction, which no step has begun with."""
        if not self._promises or workers.prefill is not None:
            return
        table.free &= window.work[rows] * workers.token_s <= self._promises.slack(now_s)
        table.open &= table.free

    def _penalties(self, group: Sequence[Waiting], table: Costs, workers: WorkerView, now_s: float) -> Floats:
        if self._fleets is None or not self._fleets.several:
            return np.zeros((1, 1))
        return self._fleets.penalties(group, table.ttft, table.service, workers, now_s)

    def _soften(self, table: Costs, at: int, column: int, penalty: Floats) -> int:
        """Draw a worker with room if there is a temperature: p ∝ exp(-(cost - least) / ((most - least) × temperature))."""
        temperature = self._settings.temperature
        free = np.flatnonzero(table.free[at])
        if temperature <= 0 or len(free) < 2:
            return column
        cost = (table.choice + penalty)[at, free]
        near = cost < cost.min() + PREFERENCE_S / 2  # of the preferred fleet
        free, cost = free[near], cost[near]
        spread = cost.max() - cost.min()
        weights = np.exp(-(cost - cost.min()) / (spread * temperature)) if spread > 0 else np.ones(len(free))
        return int(self._rng.choices(free.tolist(), weights.tolist())[0])


def pick_plain(
    request: Waiting, work: Sequence[float], workers: WorkerView, congestion: float, now_s: float, settings: SchedulerSettings
) -> Pick | None:
    """Pick as `KvPolicy` does where only this request waits and every worker may take it. `work`: uncached tokens on each."""
    at, column, cost_s, aged, _ = kernel.choose(
        [request],
        [blocks_needed(request)],
        kernel.numbers(work),
        b"\1" * len(work),
        workers.columns(),
        congestion,
        now_s,
        settings.max_wait_s,
        settings.ageing,
    )
    return Pick(at, column, cost_s, aged) if at >= 0 else None


def is_remote(table: Costs, at: int, column: int) -> bool:
    """Return whether a prefill worker would compute the prompt, if that worker got the request now."""
    return table.remote is not None and bool(table.remote[at, column])


Choose = Callable[[list[int], WorkerView], int]


class SimplePolicy:
    """Places the first request in fair order that some worker with room may take; `choose` picks the worker."""

    def __init__(self, settings: SchedulerSettings, choose: Choose) -> None:
        self._settings = settings
        self._choose = choose
        self.passed_up = False

    def pick(
        self, group: Sequence[Waiting], window: CostMatrix, workers: WorkerView, congestion: float, now_s: float
    ) -> Pick | None:
        if workers.prefill is None and not any(workers.all_room):
            return None
        rows = window.numbers(group)
        table = costs(window, rows, workers, 0.0, self._settings)
        possible = table.free.any(axis=1)
        if not possible.any():
            return None
        at = int(possible.argmax())
        column = self._choose([int(c) for c in np.flatnonzero(table.free[at])], workers)
        return Pick(at, column, float(table.here[at, column]), remote=is_remote(table, at, column))


class _RoundRobin:
    def __init__(self) -> None:
        self._last = -1

    def __call__(self, columns: list[int], workers: WorkerView) -> int:
        self._last = next((column for column in columns if column > self._last), columns[0])
        return self._last


def _least_loaded(columns: list[int], workers: WorkerView) -> int:
    """Choose by time, not by count: a long prompt is more load than a short one."""
    wait_s, running, unevenness = workers.all_wait_s, workers.all_running, workers.all_unevenness
    return min(columns, key=lambda column: (wait_s[column], running[column], unevenness[column]))


PolicyFactory = Callable[[SchedulerSettings, random.Random], Policy]


def least_loaded(settings: SchedulerSettings, rng: random.Random) -> Policy:
    """Choose the worker that is free first. `direct` is this one too: eligibility sees to the worker that a request names."""
    return SimplePolicy(settings, _least_loaded)


def round_robin(settings: SchedulerSettings, rng: random.Random) -> Policy:
    return SimplePolicy(settings, _RoundRobin())


def at_random(settings: SchedulerSettings, rng: random.Random) -> Policy:
    return SimplePolicy(settings, lambda columns, workers: rng.choice(columns))


def power_of_two(settings: SchedulerSettings, rng: random.Random) -> Policy:
    """Choose the less loaded of two random workers (Mitzenmacher 2001)."""
    return SimplePolicy(settings, lambda columns, workers: _least_loaded(rng.sample(columns, min(2, len(columns))), workers))


_FACTORIES: dict[str, PolicyFactory] = {
    "least-loaded": least_loaded,
    "direct": least_loaded,
    "round-robin": round_robin,
    "random": at_random,
    "power-of-two": power_of_two,
}


def policy_factory(name: str) -> PolicyFactory | None:
    """Return the factory of a policy, or None for `kv`, which the scheduler gives worker groups and promises.

    `module:function` names one of another package. Raises SettingsInvalid if it is unknown or cannot be imported.
    """
    if name == "kv":
        return None
    if name in _FACTORIES:
        return _FACTORIES[name]
    module, _, function = name.partition(":")
    try:
        factory: PolicyFactory = getattr(import_module(module), function)
    except Exception as error:  # the code of an operator may raise anything
        raise SettingsInvalid(f"policy {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    return factory


def make_policy(
    settings: SchedulerSettings,
    rng: random.Random,
    fleets: FleetChooser | None = None,
    promises: Promises | None = None,
) -> Policy:
    """Return a new instance of the policy that is set. Raises SettingsInvalid as `policy_factory` does."""
    factory = policy_factory(settings.policy)
    return KvPolicy(settings, rng, fleets, promises) if factory is None else factory(settings, rng)


def prefer_session(
    row: CostRow, pick: Pick, window: CostMatrix, workers: WorkerView, settings: SchedulerSettings
) -> tuple[int, bool]:
    """Return the session's own worker if it has room and costs little more, else the pick; and whether the prompt is remote."""
    column = row.session
    if column < 0 or column == pick.column or not window.same_fleet(column, pick.column):
        return pick.column, pick.remote
    if not (workers.all_room[column] or workers.prefill is not None):
        return pick.column, pick.remote
    table = costs(window, np.array([row.number]), workers, 0.0, settings)
    if not table.free[0, column]:
        return pick.column, pick.remote
    own, best = float(table.here[0, column]), float(table.here[0, pick.column])
    if own <= best * (1.0 + settings.session_slack):
        return column, is_remote(table, 0, column)
    return pick.column, pick.remote
