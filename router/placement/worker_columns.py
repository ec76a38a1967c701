"""Workers that each have a column of the scheduler's arrays. Columns are dense, 0 … n-1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from headrace.router.placement.calibration import SpeedEstimate
from headrace.router.placement.types import WorkerInfo


class ColumnLoad(Protocol):
    """The load of a worker that has a column."""

    info: WorkerInfo
    column: int


L = TypeVar("L", bound=ColumnLoad)


class WorkerColumns(Generic[L]):
    """Holds workers by name and in the order of their columns."""

    def __init__(self, make: Callable[[WorkerInfo, int, SpeedEstimate], L]) -> None:
        """`make(info, column, speed)` makes the load of a new worker."""
        self._make = make
        self._by_name: dict[str, L] = {}
        self.get: Callable[[str], L | None] = self._by_name.get  # the worker of a name
        self.ordered: list[L] = []

    def __len__(self) -> int:
        return len(self.ordered)

    def __iter__(self) -> Iterator[L]:
        return iter(self.ordered)

    def put(self, info: WorkerInfo, speed: SpeedEstimate) -> bool:
        """Add or update a worker. Return whether the columns have changed."""
        known = self._by_name.get(info.worker)
        if known is not None:
            known.info = info
            return False
        load = self._make(info, len(self.ordered), speed)
        self._by_name[info.worker] = load
        self.ordered.append(load)
        return True

    def _remove(self, worker: str) -> L | None:
        load = self._by_name.pop(worker, None)
        if load is not None:
            self.ordered.remove(load)
            for column, other in enumerate(self.ordered):
                other.column = column
        return load
