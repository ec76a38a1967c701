"""The sequences that wait for a slot, best first: by priority, then by arrival."""

from __future__ import annotations

import heapq

from headrace.workers.sim.scheduling.run import Phase, SequenceRun


class WaitingQueue:
    """A priority queue of sequences. Entries of sequences that have left are skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], SequenceRun]] = []
        self.count = 0

    def push(self, run: SequenceRun) -> None:
        run.phase = Phase.WAITING
        heapq.heappush(self._heap, (run.rank, run))
        self.count += 1

    def first(self) -> SequenceRun | None:
        """Return the sequence to be admitted next, without removing it."""
        while self._heap:
            run = self._heap[0][1]
            if run.phase is Phase.WAITING:
                return run
            heapq.heappop(self._heap)
        return None

    def pop(self) -> None:
        """Remove the sequence that `first` returned."""
        heapq.heappop(self._heap)
        self.count -= 1

    def leave(self) -> None:
        """Note that a waiting sequence has left; its phase marks its entry."""
        self.count -= 1
