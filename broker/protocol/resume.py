"""Describes a request that was judged elsewhere before: what its clients have, and the crashes that count against it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from headrace.broker.messages.control import HistoryEntry
from headrace.broker.messages.frames import Finish

GENERATION = 1000  # attempts of generation k start at k × 1000, above any copy that may still be stored


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """The state in which a request is submitted again by another judge: per choice its ids, and its end if it has one."""

    emitted: list[list[int]]
    finished: list[Finish | None]
    history: list[HistoryEntry] = []

    @property
    def fresh(self) -> bool:
        """True if there is nothing to resume from: the request can be submitted as a new one."""
        return not any(self.emitted) and not any(self.finished) and not self.history

    @property
    def generation(self) -> int:
        """The generation whose attempts are above all of the history."""
        return 1 + max((entry.attempt for entry in self.history), default=0) // GENERATION


class CrashRecorder(Protocol):
    """Stores the crashes of a request whose state outlives its judge."""

    def recorded(self, crashes: Sequence[HistoryEntry]) -> bool:
        """Return whether all of these are stored. If not, begin to store them; the claim is answered `wait` until then."""
