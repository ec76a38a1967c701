"""Describes all workers at one moment, as a decision sees them: as plain lists and as arrays, the one from the other on demand.

The kernel takes plain numbers (`columns`); prefill workers, worker groups and guards of first tokens are weighed with arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from headrace.broker.places import worker_of
from headrace.router.placement import kernel as interpreted
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.transfer import PrefillView
from headrace.router.placement.types import Waiting, WorkerInfo

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.intp]

try:
    kernel = import_module("headrace.router.placement._kernel")
except ImportError:  # it was not compiled
    kernel = interpreted


class WorkerView:
    """A value per column. The lists are named `all_…`; the arrays have the same names without that."""

    all_wait_s: list[float]  # until it could begin with one more prompt
    all_pending: list[float]  # prompt tokens before that
    all_token_s: list[float]  # seconds per uncached token, with the decodes of the steps it fills
    all_step_s: list[float]  # seconds of a step beside its prefill
    all_room: list[bool]
    all_blocks_free: list[float]
    all_running: list[int]
    all_unevenness: list[float]
    all_disturbed: list[float]  # loss of the running requests, in parts of the service
    wait_s: Floats
    pending: Floats
    token_s: Floats
    step_s: Floats
    room: Bools
    blocks_free: Floats
    running: Ints
    unevenness: Floats
    disturbed: Floats

    def __init__(self, *, prefill: PrefillView | None = None, **columns: Any) -> None:
        """`columns`: all, each as a list or as an array. `prefill` None: every prompt is computed where it is answered."""
        self.prefill = prefill
        self._columns: Any = None
        self.__dict__.update(columns)

    def __getattr__(self, name: str) -> Any:
        """Make the form of a column that is missing from the other one."""
        if name not in WorkerView.__annotations__:
            raise AttributeError(name)
        if name.startswith("all_"):
            found: Any = self.__dict__[name.removeprefix("all_")].tolist()
        else:
            found = np.array(self.__dict__["all_" + name], dtype=_TYPES.get(name, np.float64))
        self.__dict__[name] = found
        return found

    def part(self, columns: Ints) -> WorkerView:
        """Copy what is needed of these columns to explain a decision."""
        return WorkerView(**{name: getattr(self, name)[columns] for name in _EXPLAINED})

    def close(self, column: int) -> None:
        self.all_room[column] = False
        self.__dict__.pop("room", None)
        self._columns = None

    def columns(self) -> Any:
        """Return what `kernel.choose` looks at: waits, seconds per token, of a step, free blocks (-1 without room), tastes."""
        if self._columns is None:
            if "all_wait_s" in self.__dict__:
                free = [blocks if room else -1.0 for blocks, room in zip(self.all_blocks_free, self.all_room, strict=True)]
                taste = [factor - 1.0 + lost for factor, lost in zip(self.all_unevenness, self.all_disturbed, strict=True)]
                self._columns = kernel.numbers([*self.all_wait_s, *self.all_token_s, *self.all_step_s, *free, *taste])
            else:
                free_blocks = np.where(self.room, self.blocks_free, -1.0)
                tastes = self.unevenness - 1.0 + self.disturbed
                parts = np.array([self.wait_s, self.token_s, self.step_s, free_blocks, tastes])
                self._columns = kernel.rows(parts, range(5))
        return self._columns


_EXPLAINED = ("wait_s", "pending", "token_s", "step_s", "room", "running")
_TYPES = {"room": np.bool_, "running": np.intp}


def why_not(request: Waiting, load: WorkerLoad) -> str:
    """Return the reason for which this worker may not take the request; empty if it may."""
    info = load.info
    return "draining" if info.draining else lacks(request, info)


def lacks(request: Waiting, info: WorkerInfo) -> str:
    """Return what this worker lacks for the request, whether it serves now or not; empty if nothing."""
    if request.worker and request.worker not in (info.worker, worker_of(info.worker)):
        return "another worker is named"
    if missing := request.require - info.labels:
        return f"no label {', '.join(sorted(missing))}"
    if request.adapter and request.adapter not in info.adapters:
        return f"no adapter {request.adapter}"
    if info.context and request.longest > info.context:
        return f"its context has {info.context} tokens"
    return ""


def comes(request: Waiting, loads: LoadTable) -> bool:
    """Return whether a worker that is about to serve again may take the request then."""
    return any(load.info.waking and not lacks(request, load.info) for load in loads)


def eligible_columns(request: Waiting, loads: LoadTable) -> Sequence[int]:
    anywhere = not request.worker and not request.require and not request.adapter
    if anywhere and (not loads.least_context or request.longest <= loads.least_context):
        return loads.serving
    return [load.column for load in loads if not why_not(request, load)]


def session_column(session: str, columns: Sequence[int], loads: LoadTable) -> int:
    """Return the column of the worker that a session belongs to, given with its tenant: no other tenant's is the same.

    By rendezvous hashing (Thaler and Ravishankar 1998) all routers agree without a message, a restart forgets nothing, and a
    worker that comes or goes moves only the sessions that it gains or had.
    """
    names = loads.ordered
    return max(columns, key=lambda column: xxhash.xxh3_64_intdigest(f"{session}\0{names[column].info.worker}".encode()))
