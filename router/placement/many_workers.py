"""Describes the workers of a large pool: arrays that are kept, in which only what has changed since is computed anew.

A decision about hundreds of workers looks at few of them that have changed since the last one, and describing each takes some
microseconds.  What depends on the time is computed from the arrays, for all at once.  `make_worker_view` describes a small pool
in less time; the numbers are the same to the last bit, and `tests/unit/router/placement/test_many_workers.py` compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, auto
from math import fsum, inf

import numpy as np

from headrace.router.placement.costs.cost import (
    FEW,
    STEP_TOKENS,
    RecentWork,
    batch_lookahead_tokens,
    lookahead_tokens,
)
from headrace.router.placement.disagg.prefill_costs import PrefillView
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.worker_view import Bools, Floats, WorkerView


class Figure(IntEnum):
    """The rows of the table: what is known of each worker, whatever the time."""

    QUEUED = 0  # prompt tokens, as reported
    REPORTED_S = auto()
    RATE = auto()  # prompt tokens per second
    PLACED = auto()  # prompt tokens on their way
    TOKEN_S = auto()
    STEP_S = auto()
    RUNNING = auto()
    LOOKAHEAD = auto()  # pending tokens below which it has room, if it is open
    OPEN = auto()
    SLOT_WAIT_S = auto()
    BLOCKS_FREE = auto()
    BATCH_LOOKAHEAD = auto()  # the last four as batch requests see them while there are interactive ones
    BATCH_OPEN = auto()
    BATCH_SLOT_WAIT_S = auto()
    BATCH_BLOCKS_FREE = auto()


class ManyWorkers:
    """The workers of one pool. It is for one of which `LoadTable.many` is true."""

    def __init__(self, loads: LoadTable, settings: SchedulerSettings, recent: RecentWork) -> None:
        self._loads = loads
        self._settings = settings
        self._recent = recent
        self._version = -1
        self._table: Floats = np.zeros((len(Figure), 0))
        self._shares: Floats = np.zeros((2, 0))  # recent tokens and requests
        self._columns: dict[str, int] = {}
        self._unevenness: Floats | None = None  # None: to be computed

    def view(
        self,
        now_s: float,
        *,
        prefill: PrefillView | None = None,
        awaited: Callable[[str], int] | None = None,
        batch_alone: bool | None = None,
    ) -> WorkerView:
        """Describe the workers as they are now, as `make_worker_view` does."""
        table, batch = self._current(), batch_alone is not None
        pending = self._pending(now_s)
        free = table[Figure.BATCH_BLOCKS_FREE if batch else Figure.BLOCKS_FREE].copy()
        if awaited is not None:
            free -= [awaited(name) for name in self._loads.names]
        running = table[Figure.RUNNING]
        return WorkerView(
            wait_s=pending / table[Figure.RATE] + table[Figure.BATCH_SLOT_WAIT_S if batch else Figure.SLOT_WAIT_S],
            pending=pending,
            token_s=table[Figure.TOKEN_S].copy(),
            step_s=table[Figure.STEP_S].copy(),
            room=self._room(pending, batch_alone),
            blocks_free=free,
            running=running.astype(np.intp),
            disturbed=self._settings.disturbance * running,
            unevenness=self._uneven(),
            prefill=prefill,
        )

    def room(self, now_s: float, *, batch_alone: bool | None = None) -> Bools:
        """Mark the workers that have room now."""
        self._current()
        return self._room(self._pending(now_s), batch_alone)

    def totals(self, now_s: float) -> tuple[float, float]:
        """Return the pending prompt tokens of all workers, and the tokens per second that they compute."""
        table = self._current()
        return float(self._pending(now_s).sum()), float(table[Figure.RATE].sum())

    def next_room_s(self, now_s: float, *, batch_alone: bool | None = None) -> float:
        """Predict when the next worker will have computed what keeps it from having room; infinite if none has to."""
        table = self._current()
        over = self._pending(now_s) - table[self._lookahead(batch_alone)]
        return float(np.where(over > 0, now_s + over / table[Figure.RATE], np.inf).min(initial=np.inf))

    # Parts.

    def _room(self, pending: Floats, batch_alone: bool | None) -> Bools:
        table = self._table
        open_: Bools = table[Figure.OPEN if batch_alone is None else Figure.BATCH_OPEN] > 0.0
        if batch_alone is None and self._settings.binding == "early":
            return open_
        open_ &= pending < table[self._lookahead(batch_alone)]
        return open_

    @staticmethod
    def _lookahead(batch_alone: bool | None) -> Figure:
        return Figure.BATCH_LOOKAHEAD if batch_alone is False else Figure.LOOKAHEAD

    def _pending(self, now_s: float) -> Floats:
        table = self._table
        done = (now_s - table[Figure.REPORTED_S]) * table[Figure.RATE]
        left = np.maximum(0.0, table[Figure.QUEUED] - done)
        pending: Floats = np.where(table[Figure.QUEUED] > 0.0, left, 0.0) + table[Figure.PLACED]
        return pending

    def _uneven(self) -> Floats:
        strength = self._settings.balance
        if strength <= 0:
            return np.ones(len(self._loads))
        recent, columns = self._recent, self._columns
        if recent.touched:
            for worker in recent.touched:
                self._shares[:, columns[worker]] = recent.share(worker)
            recent.touched.clear()
            self._unevenness = None
        if self._unevenness is None:
            tokens, requests = self._shares
            tokens_each = max(fsum(tokens.tolist()) / (fsum(requests.tolist()) or 1.0), 1.0)
            factor = np.ones(len(columns))
            for sums, unit, weight in ((tokens, FEW * tokens_each, strength), (requests, FEW, 2 * strength)):
                share = sums / recent.scale
                mean = fsum(share.tolist()) / len(share)
                factor *= np.where(share > mean, 1.0 + weight * (share - mean) / (mean + unit), 1.0)
            self._unevenness = factor
        return self._unevenness

    def _current(self) -> Floats:
        """Bring the table up to date and return it."""
        loads = self._loads
        if self._version != loads.version:
            self._version = loads.version
            self._table = np.zeros((len(Figure), len(loads)))
            self._shares = np.zeros((2, len(loads)))
            self._columns = {name: column for column, name in enumerate(loads.names)}
            for column, name in enumerate(loads.names):
                self._shares[:, column] = self._recent.share(name)
            self._recent.touched.clear()
            self._unevenness = None
        for load in [load for load in loads.ordered if not load.described]:
            self._table[:, load.column] = self._describe(load)
            load.described = True
        return self._table

    def _describe(self, load: WorkerLoad) -> tuple[float, ...]:
        """Return the figures of a worker, in the order of `Figure`."""
        settings, info, speed, report, busy = self._settings, load.info, load.speed, load.report, load.running
        rate, decode_s = speed.prefill_tokens_per_s, speed.per_decode_s * busy
        taken = busy >= info.slots or load.on_trial
        if settings.binding == "early":
            open_ = not info.draining
        else:
            open_ = load.takes_one_more(settings.spare_slots, settings.lookahead_s)
        return (
            report.queued_prefill_tokens if report is not None else 0.0,
            load.reported_s,
            rate,
            load.placed_tokens,
            1.0 / rate + decode_s / (info.step_tokens or STEP_TOKENS),
            speed.base_s + decode_s,
            busy,
            lookahead_tokens(load, settings),
            open_,
            load.slot_wait_s() if taken else 0.0,
            load.blocks_free() if busy else inf,
            batch_lookahead_tokens(load, settings, alone=False),
            load.takes_batch(settings.batch_reserve),
            load.slot_wait_s(batch=True) if taken else 0.0,
            (load.blocks_free(batch=True) if busy else inf) - settings.batch_reserve * info.blocks,
        )
