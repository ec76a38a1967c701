"""Divides the lines that may wait for a model among its batches, by how urgent they are: the least slack first."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.broker.batches.record import BatchRecord

LEAST_LEFT_S = 30.0  # time that a batch near its end still counts with
LINES_PER_SLOT = 4  # of the workers that serve the model: twice what carriers hold, so that none runs dry between two looks
LEAST_OUT = 32
FLOOR = 0.1  # the part of the window that is divided evenly, so that no batch waits for the end of another


def lines_out(slots: int, most: int) -> int:
    """Return how many lines of a model may be out at a time, by the slots of its workers.

    Lines that are out are delivered in the order in which they were stored, so one that is due soon waits for all before it.
    """
    return min(most, max(LEAST_OUT, LINES_PER_SLOT * slots))


def shares(records: Iterable[BatchRecord], window: int, now: float) -> dict[str, int]:
    """Return how many lines of each batch may be published and without a result.

    `records` are the batches in progress of one model, on all frontends. Each gets at least one line and at most those that
    are open. The urgency of a batch is the rate that it needs: its open lines per second until its end.
    """
    waiting = sorted((r for r in records if r.counts.open > 0), key=lambda r: (r.expires_at, r.created, r.id))
    if not waiting:
        return {}
    need = {r.id: r.counts.open / max(LEAST_LEFT_S, r.expires_at - now) for r in waiting}
    room = {r.id: r.counts.open for r in waiting}
    even = max(1, int(window * FLOOR / len(waiting)))
    given = {r.id: min(even, room[r.id]) for r in waiting}
    left = window - sum(given.values())
    while left > 0 and (hungry := [r for r in waiting if given[r.id] < room[r.id]]):
        total = sum(need[r.id] for r in hungry)
        before = left
        for r in hungry:
            more = min(int(before * need[r.id] / total), room[r.id] - given[r.id], left)
            given[r.id] += more
            left -= more
        if left == before:  # less than one line for each: the first ones get them
            for r in hungry[:left]:
                given[r.id] += 1
                left -= 1
    return given
