"""Cost matrix of the waiting requests, as arrays: a row per request, a column per worker.

It is kept current as overlaps change, so that a decision is a few operations on whole arrays and looks nothing up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import tanh
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.router.index.types import NO_OVERLAP, Overlap, Tier
from headrace.router.placement.disagg.prefill_pool import PrefillPool
from headrace.router.placement.eligibility import eligible_columns, session_column
from headrace.router.placement.load import LoadTable
from headrace.router.placement.types import Waiting
from headrace.router.placement.worker_view import Bools, Floats, Ints

_FIRST_ROWS = 64


@dataclass(slots=True)
class CostRow:
    """The row of a request."""

    request: Waiting
    number: int
    overlaps: Mapping[str, Overlap]
    session: int = -1  # the column its session belongs to
    ineligible_since_s: float | None = None  # no worker may take it, since then
    blocks: float = 0.0  # KV blocks it will need beside those that are cached, about


def uncached_tokens(request: Waiting, overlap: Overlap, tiers: Mapping[Tier, float]) -> float:
    """Prompt tokens to be computed, with loading a block from a slower tier counted as the part of computing it that it does
    not save. At least one: the last token is always computed."""
    saved = overlap.device * tiers.get("device", 1.0)
    saved += overlap.host * tiers.get("host", 0.0) + overlap.disk * tiers.get("disk", 0.0)
    return max(request.tokens - saved * request.block_size, 1.0)


def blocks_needed(request: Waiting) -> float:
    """Return the KV blocks that a request will need beside those that are cached, about."""
    return (request.tokens + min(request.max_tokens, 256)) / request.block_size if request.block_size else 0.0


class CostMatrix:
    """Rows of waiting requests. `loads` gives the columns, `prefill` those of `remote`."""

    def __init__(self, loads: LoadTable, prefill: PrefillPool, tiers: Mapping[Tier, float]) -> None:
        self._loads = loads
        self._prefill = prefill
        self._tiers = tiers
        self.rows: dict[str, CostRow] = {}
        self._free: list[int] = []
        self.uncached: Floats = np.zeros((0, 0))
        self.work: Floats = np.zeros((0, 0))  # uncached, times the factor of preferred labels
        self.remote: Floats = np.zeros((0, 0))  # tokens that each prefill worker would compute; infinite where it cannot
        self.eligible: Bools = np.zeros((0, 0), dtype=np.bool_)
        self.arrived: Floats = np.zeros(0)
        self.deadline: Floats = np.zeros(0)
        self.priority: Floats = np.zeros(0)
        self.blocks: Floats = np.zeros(0)
        self._spare: Floats = np.zeros((2, 0, 0))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def width(self) -> int:
        """The number of columns."""
        return len(self._loads)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.rows

    def add(self, request: Waiting, overlaps: Mapping[str, Overlap], now_s: float) -> CostRow:
        if not self._free:
            self._grow()
        row = CostRow(request, self._free.pop(), overlaps)
        self.rows[request.id] = row
        n = row.number
        self.arrived[n] = request.arrived_s
        self.deadline[n] = request.deadline_s
        self.priority[n] = request.priority
        self.blocks[n] = row.blocks = blocks_needed(request)
        self._fill(row, now_s)
        return row

    def remove(self, request_id: str) -> CostRow | None:
        row = self.rows.pop(request_id, None)
        if row is not None:
            self._free.append(row.number)
        return row

    def refresh(
        self, request_id: str, overlaps: Mapping[str, Overlap], changed: Collection[str] | None = None
    ) -> CostRow | None:
        """Update the row of a request whose overlaps have changed. `changed`: for these workers; None = for any."""
        row = self.rows.get(request_id)
        if row is None:
            return None
        row.overlaps = overlaps
        if row.request.prefer or changed is None:
            self._fill_work(row)
            return row
        request, n = row.request, row.number
        for worker in changed:
            self._set(n, worker, request, overlaps.get(worker, NO_OVERLAP))
        return row

    def _set(self, n: int, worker: str, request: Waiting, overlap: Overlap) -> None:
        load = self._loads.get(worker)
        if load is not None:
            tokens = uncached_tokens(request, load.info.whole(overlap), self._tiers)
            self.uncached[n, load.column] = self.work[n, load.column] = tokens
        elif (other := self._prefill.get(worker)) is not None and self.remote[n, other.column] < np.inf:
            self.remote[n, other.column] = uncached_tokens(request, other.info.whole(overlap), self._tiers)

    def columns_changed(self, now_s: float) -> None:
        """Compute every row anew, because workers have come, gone or changed."""
        rows, width = len(self.arrived), len(self._loads)
        self.uncached = np.ones((rows, width))
        self.remote = np.ones((rows, len(self._prefill)))
        self.work = np.ones((rows, width))
        self.eligible = np.zeros((rows, width), dtype=np.bool_)
        for row in self.rows.values():
            self._fill(row, now_s)

    def same_fleet(self, column: int, other: int) -> bool:
        """Return whether the workers of two columns belong to one fleet."""
        return self._loads.ordered[column].info.fleet == self._loads.ordered[other].info.fleet

    def numbers(self, requests: Sequence[Waiting]) -> Ints:
        rows = self.rows
        return np.fromiter((rows[request.id].number for request in requests), dtype=np.intp, count=len(requests))

    def spare(self, rows: int) -> Floats:
        """Return two arrays of so many rows to compute in, until the next call. New ones cost more than to fill them."""
        if self._spare.shape[1] < rows or self._spare.shape[2] != self.width:
            self._spare = np.empty((2, rows, self.width))
        return self._spare[:, :rows]

    # Parts.

    def _fill(self, row: CostRow, now_s: float) -> None:
        columns = eligible_columns(row.request, self._loads)
        row.session = -1
        if row.request.session and columns:
            row.session = session_column(f"{row.request.tenant}\0{row.request.session}", columns, self._loads)
            if row.request.affinity == "hard":
                columns = [row.session]
        everybody = len(columns) == len(self._loads)
        self.eligible[row.number] = everybody
        if columns:
            if not everybody:
                self.eligible[row.number, columns] = True
            row.ineligible_since_s = None
        elif row.ineligible_since_s is None:
            row.ineligible_since_s = now_s
        self._fill_work(row)

    def _fill_remote(self, row: CostRow) -> None:
        request, n = row.request, row.number
        fleet = request.prefill_fleet
        if fleet and all(load.info.fleet != fleet for load in self._prefill):
            fleet = ""  # preferred, no filter
        for load in self._prefill:
            able = not request.adapter or request.adapter in load.info.adapters
            able = able and (not fleet or load.info.fleet == fleet)
            overlap = load.info.whole(row.overlaps.get(load.info.worker, NO_OVERLAP))
            self.remote[n, load.column] = uncached_tokens(request, overlap, self._tiers) if able else np.inf

    def _fill_work(self, row: CostRow) -> None:
        request, tiers, n = row.request, self._tiers, row.number
        uncached = self.uncached[n]
        uncached[:] = max(request.tokens, 1.0)
        tokens: dict[Overlap, float] = {}  # many workers have the same part of it
        for worker, overlap in row.overlaps.items():
            load = self._loads.get(worker)
            if load is not None:
                overlap = load.info.whole(overlap)
                found = tokens.get(overlap)
                if found is None:
                    found = tokens[overlap] = uncached_tokens(request, overlap, tiers)
                uncached[load.column] = found
        self.work[n] = uncached
        if len(self._prefill):
            self._fill_remote(row)
        if request.prefer:
            for load in self._loads:
                liking = sum(weight for label, weight in request.prefer.items() if label in load.info.labels)
                if liking:
                    self.work[n, load.column] *= 2.718281828 ** -tanh(liking)

    def _grow(self) -> None:
        before = len(self.arrived)
        after = max(_FIRST_ROWS, before * 2)
        width = len(self._loads)
        self.uncached = _longer(self.uncached, (after, width))
        self.work = _longer(self.work, (after, width))
        self.remote = _longer(self.remote, (after, len(self._prefill)))
        self.eligible = _longer(self.eligible, (after, width))
        for name in ("arrived", "deadline", "priority", "blocks"):
            setattr(self, name, _longer(getattr(self, name), (after,)))
        self._free.extend(range(after - 1, before - 1, -1))


def _longer(array: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    longer = np.zeros(shape, dtype=array.dtype)
    if array.size and array.shape[1:] == shape[1:]:
        longer[: len(array)] = array
    return longer
