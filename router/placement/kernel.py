# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# cython: annotation_typing=False, infer_types=True
"""The decision of `KvPolicy`: of the requests whose turn it is, the one that is placed next, and its worker.

One loop over all pairs of a request and a worker, on plain numbers.  This source runs as it is, and is compiled as `_kernel`
where there is a compiler; `_kernel.pxd` has the types for that.  Both choose alike: of equals the first.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import inf
from typing import Any

COMPILED = __name__.endswith("._kernel")
OUT_OF_TURN_S = 1e6  # seconds of score that set requests that have waited too long apart from all others
PRIORITY_S = 1e3  # seconds of score that set one priority apart from the next
DEADLINE_MARGIN_S = 2.0
NEARLY_S = 1e-9  # costs that differ by less are equal


def numbers(values: Sequence[float]) -> Any:
    """Return them in the form that `choose` takes."""
    return array("d", values) if COMPILED else values


def rows(matrix: Any, which: Sequence[int]) -> Any:
    """Return these rows of an array, one after the other, in the form that `choose` takes."""
    taken = matrix[which].reshape(-1)
    return taken if COMPILED else taken.tolist()


def choose(
    requests: Sequence[Any],
    blocks: Sequence[float],
    works: Any,
    eligibles: Any,
    columns: Any,
    congestion: float,
    now_s: float,
    max_wait_s: float,
    ageing: float,
) -> tuple[int, int, float, bool, bool]:
    """Return the place of a request, its column, its cost there, whether it has waited too long, and whether one was passed up.

    The place is -1 if none can be placed now. Passed up is one that could have been, and waits for a better worker. `blocks`
    has a number per request, `works` and `eligibles` have one per pair, row after row, and `columns` is `WorkerView.columns`.
    """
    width = len(columns) // 5
    wait_s, token_s, step_s = columns[:width], columns[width : 2 * width], columns[2 * width : 3 * width]
    free_blocks, taste = columns[3 * width : 4 * width], columns[4 * width :]
    factor = 1.0 + congestion
    at, at_column, at_cost, at_aged, least = -1, -1, 0.0, False, inf
    passed_up = False
    begin = 0
    for nth, request in enumerate(requests):
        needed = blocks[nth]
        work, eligible = works[begin : begin + width], eligibles[begin : begin + width]
        begin += width
        best_cost, best_open = inf, False  # of all workers
        choice, here, mine = inf, inf, -1  # of those that have room
        for column in range(width):
            if not eligible[column]:
                continue
            service = work[column] * token_s[column] + step_s[column]
            cost = wait_s[column] + service * factor
            free = needed <= free_blocks[column]
            if cost < best_cost:
                best_cost, best_open = cost, free
            if free:
                preferred = cost + service * taste[column]
                if preferred < choice:
                    choice, here, mine = preferred, cost, column
        if mine < 0:
            continue
        age = now_s - request.arrived_s
        aged = age > max_wait_s or request.deadline_s - now_s < here + DEADLINE_MARGIN_S
        if not best_open and best_cost < here - NEARLY_S and not aged:
            passed_up = True
            continue
        score = work[mine] * token_s[mine] - ageing * age + request.priority * PRIORITY_S
        if aged:
            score -= OUT_OF_TURN_S + age
        if at < 0 or score < least:
            at, at_column, at_cost, at_aged, least = nth, mine, here, aged, score
    return at, at_column, at_cost, at_aged, passed_up
