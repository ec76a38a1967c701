"""The choice of `KvPolicy` for a few requests and workers, in plain Python.

An array operation costs about the same for one number as for a hundred, and a decision takes dozens of them.  While little
waits, which is nearly always, plain floats are several times as fast.  The choice is that of the arrays to the last bit: the
same operations in the same order, and of equals the first.  `tests/unit/router/placement/test_scalar_choice.py` compares
the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from headrace.router.placement.cost import CostMatrix, blocks_needed
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Waiting
from headrace.router.placement.worker_view import WorkerView

ROW = 4  # cost of a request beside its pairs, in pairs of a request and a worker
MOST_PAIRS = 400  # about where arrays are as fast
OUT_OF_TURN_S = 1e6  # seconds of score that set requests that have waited too long apart from all others
PRIORITY_S = 1e3  # seconds of score that set one priority apart from the next
DEADLINE_MARGIN_S = 2.0


@dataclass(frozen=True, slots=True)
class ScalarChoice:
    """A choice; `at` is -1 if no request can be placed now. `passed_up`: one could have been, and waits for a better worker."""

    at: int = -1
    column: int = -1
    cost_s: float = 0.0
    aged: bool = False
    passed_up: bool = False


def applies(requests: int, workers: WorkerView) -> bool:
    """Return whether `choose` is the quicker way, where `array_choice` may be used at all."""
    return requests * (len(workers.all_room) + ROW) <= MOST_PAIRS


def choose(
    group: Sequence[Waiting],
    window: CostMatrix,
    workers: WorkerView,
    congestion: float,
    now_s: float,
    settings: SchedulerSettings,
) -> ScalarChoice:
    """Choose a request and its worker exactly as `KvPolicy.pick` does with arrays."""
    if len(workers.all_wait_s) == 1:
        return _choose_of_one_worker(group, window, workers, congestion, now_s, settings)
    factor = 1.0 + congestion
    columns = [
        (
            column,
            wait_s,
            workers.all_token_s[column],
            workers.all_step_s[column],
            workers.all_room[column],
            workers.all_blocks_free[column],
            workers.all_unevenness[column] - 1.0 + workers.all_disturbed[column],
        )
        for column, wait_s in enumerate(workers.all_wait_s)
    ]
    rows = [window.rows[request.id] for request in group]
    numbers = [row.number for row in rows]
    works: list[list[float]] = window.work[numbers].tolist()  # all at once: an array of one row costs as much as one of forty
    eligibles: list[list[bool]] = window.eligible[numbers].tolist()
    at, at_column, at_cost, at_aged, least = -1, -1, 0.0, False, inf
    passed_up = False
    for nth, (request, row, work, eligible) in enumerate(zip(group, rows, works, eligibles, strict=True)):
        blocks = row.blocks
        best_cost, best_open = inf, False  # of all workers
        choice, here, mine = inf, inf, -1  # of those that have room
        for column, wait_s, token_s, step_s, room, blocks_free, taste in columns:
            if not eligible[column]:
                continue
            service = work[column] * token_s + step_s
            cost = wait_s + service * factor
            free = room and blocks <= blocks_free
            if cost < best_cost:
                best_cost, best_open = cost, free
            if free:
                preferred = cost + service * taste
                if preferred < choice:
                    choice, here, mine = preferred, cost, column
        if mine < 0:
            continue
        age = now_s - request.arrived_s
        aged = age > settings.max_wait_s or request.deadline_s - now_s < here + DEADLINE_MARGIN_S
        if not best_open and best_cost < here - 1e-9 and not aged:
            passed_up = True
            continue
        score = work[mine] * workers.all_token_s[mine] - settings.ageing * age + request.priority * PRIORITY_S
        if aged:
            score -= OUT_OF_TURN_S + age
        if at < 0 or score < least:
            at, at_column, at_cost, at_aged, least = nth, mine, here, aged, score
    return ScalarChoice(at, at_column, at_cost, at_aged, passed_up)


def _choose_of_one_worker(
    group: Sequence[Waiting],
    window: CostMatrix,
    workers: WorkerView,
    congestion: float,
    now_s: float,
    settings: SchedulerSettings,
) -> ScalarChoice:
    """Choose as `choose` does where there is one worker: which request it gets is the only question."""
    if not workers.all_room[0]:
        return ScalarChoice()
    wait_s, token_s, step_s = workers.all_wait_s[0], workers.all_token_s[0], workers.all_step_s[0]
    factor, blocks_free = 1.0 + congestion, workers.all_blocks_free[0]
    ageing, max_wait_s = settings.ageing, settings.max_wait_s
    rows = [window.rows[request.id] for request in group]
    numbers = [row.number for row in rows]
    works: list[float] = window.work[numbers, 0].tolist()
    eligibles: list[bool] = window.eligible[numbers, 0].tolist()
    at, at_cost, at_aged, least = -1, 0.0, False, inf
    for nth, (request, row, work, eligible) in enumerate(zip(group, rows, works, eligibles, strict=True)):
        if not eligible or row.blocks > blocks_free:
            continue
        prefill_s = work * token_s
        cost = wait_s + (prefill_s + step_s) * factor
        age = now_s - request.arrived_s
        aged = age > max_wait_s or request.deadline_s - now_s < cost + DEADLINE_MARGIN_S
        score = prefill_s - ageing * age + request.priority * PRIORITY_S
        if aged:
            score -= OUT_OF_TURN_S + age
        if at < 0 or score < least:
            at, at_cost, at_aged, least = nth, cost, aged, score
    return ScalarChoice(at, 0 if at >= 0 else -1, at_cost, at_aged)


def choose_one(
    request: Waiting, work: Sequence[float], workers: WorkerView, congestion: float, now_s: float, settings: SchedulerSettings
) -> ScalarChoice:
    """Choose the worker of a single request exactly as `choose` does. `work`: per worker, each of which may take it."""
    factor, blocks = 1.0 + congestion, blocks_needed(request)
    best_cost, best_open = inf, False  # of all workers
    choice, here, mine = inf, inf, -1  # of those that have room
    for column, wait_s in enumerate(workers.all_wait_s):
        service = work[column] * workers.all_token_s[column] + workers.all_step_s[column]
        cost = wait_s + service * factor
        free = workers.all_room[column] and blocks <= workers.all_blocks_free[column]
        if cost < best_cost:
            best_cost, best_open = cost, free
        if free:
            preferred = cost + service * (workers.all_unevenness[column] - 1.0 + workers.all_disturbed[column])
            if preferred < choice:
                choice, here, mine = preferred, cost, column
    if mine < 0:
        return ScalarChoice()
    aged = now_s - request.arrived_s > settings.max_wait_s or request.deadline_s - now_s < here + DEADLINE_MARGIN_S
    if not best_open and best_cost < here - 1e-9 and not aged:
        return ScalarChoice(passed_up=True)
    return ScalarChoice(0, mine, here, aged)
