"""A heap of items by due time, most of which are removed before: removal is lazy, and the waste is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

WASTE = 256  # removed items that are not worth rebuilding the heap for


class Removable(Protocol):
    """`waiting` turns False once, when the item is of no interest any more."""

    waiting: bool


T = TypeVar("T", bound=Removable)


class ExpiryHeap(Generic[T]):
    """Adding costs O(log n), removal O(1) amortised, the next due one O(1). Infinite times are never due and cost nothing."""

    __slots__ = ("_heap", "_number", "_waste")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._number = 0
        self._waste = 0

    def __len__(self) -> int:
        """Count the entries, removed ones included."""
        return len(self._heap)

    def add(self, due_s: float, item: T) -> None:
        if due_s < float("inf"):
            self._number += 1
            heappush(self._heap, (due_s, self._number, item))

    def removed(self) -> None:
        """Note that an item has stopped waiting. Once those are the majority, the heap is rebuilt without them."""
        self._waste += 1
        if self._waste > WASTE and 2 * self._waste > len(self._heap):
            self._heap = [row for row in self._heap if row[2].waiting]
            heapify(self._heap)
            self._waste = 0

    def next_s(self) -> float:
        """Return when the next item is due; inf = never."""
        heap = self._heap
        while heap and not heap[0][2].waiting:
            heappop(heap)
        return heap[0][0] if heap else float("inf")

    def pop_due(self, now_s: float) -> Iterator[T]:
        """Iterate over the items that are due, soonest first, and take them out."""
        while self.next_s() <= now_s:
            yield heappop(self._heap)[2]
