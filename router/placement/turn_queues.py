"""The turns of all waiting requests: interactive ones in fair order, and batch requests behind them.

Batch requests get the room that no interactive request waits for.  Once some have waited for `batch_patience_s` without a
break, batch requests have `batch_share` of the tokens placed, through a door of their own: they cannot be denied that, nor take
more.  A request placed through it is *kept*:
the worker does not preempt it, or the share would be spent on the same prompts again and again.  Batch requests have virtual
token counters of their own, so a tenant's batches cost its interactive requests no turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from headrace.router.placement.fair_queue import ClassGroup, FairQueue
from headrace.router.placement.settings import BATCH_RANKS, FairnessSettings
from headrace.router.placement.types import Waiting
from headrace.router.placement.virtual_tokens import MOST_TOKENS

_NO_REQUESTS: frozenset[str] = frozenset()
_MOST_OWED = 4096.0  # tokens that batch requests save up at most, while others go first


class TurnQueues:
    """The waiting requests of one router. The methods are those of `FairQueue`; each concerns the queue of the request."""

    def __init__(self, settings: FairnessSettings) -> None:
        self.interactive = FairQueue(settings)
        self.batch = FairQueue(replace(settings, classes=BATCH_RANKS))
        self._share = settings.batch_share
        self._first = {one.name for one in settings.classes if one.always_first}
        self._patience_s = settings.batch_patience_s
        self._waiting_s: float | None = None  # since when there was always an interactive request that waited
        self._balance = 0.0  # tokens of their share that batch requests have not had yet
        self._door: frozenset[str] = _NO_REQUESTS  # offered for the share, the last time

    def __len__(self) -> int:
        return len(self.interactive) + len(self.batch)

    def __iter__(self) -> Iterator[Waiting]:
        yield from self.interactive
        yield from self.batch

    def _of(self, request_id: str) -> FairQueue:
        return self.batch if request_id in self.batch.entries else self.interactive

    # Waiting requests.

    def add(self, request: Waiting, *, tokens: float) -> None:
        (self.batch if request.batch else self.interactive).add(request, tokens=tokens)

    def remove(self, request_id: str) -> Waiting | None:
        request = self._of(request_id).remove(request_id)
        self._note_waiting()
        return request

    def update(self, request_id: str, tokens: float) -> None:
        self._of(request_id).update(request_id, tokens)

    def hold(self, request_id: str) -> None:
        self._of(request_id).hold(request_id)

    def release(self, request_id: str) -> None:
        self._of(request_id).release(request_id)

    def expired(self, now_s: float) -> list[Waiting]:
        late = self.interactive.expired(now_s)
        self._note_waiting()
        return late + self.batch.expired(now_s) if self.batch.entries else late

    def next_deadline_s(self) -> float:
        interactive_s = self.interactive.next_deadline_s()
        return min(interactive_s, self.batch.next_deadline_s()) if self.batch.entries else interactive_s

    def counts(self) -> dict[tuple[str, str], int]:
        return self.interactive.counts() | self.batch.counts()

    # Turns.

    def groups(self, limit: int, now_s: float) -> Sequence[ClassGroup]:
        """Group the candidates, at most `limit` of each kind. Do not keep the groups over a change of the queue.

        Batch requests are among them only while no interactive request waits, or for their share.
        """
        groups = self.interactive.groups(limit, now_s)
        self._door = _NO_REQUESTS
        if groups and self._waiting_s is None:
            self._waiting_s = now_s
        if not self.batch.entries:
            return groups
        backfill = [replace(group, batch=True) for group in self.batch.groups(limit, now_s)]
        if not groups:
            return backfill
        if not backfill or self._balance < 0.0 or self._waiting_s is None or now_s - self._waiting_s < self._patience_s:
            return groups
        door = replace(backfill[0], batch=False, kept=True)  # it gets the room that an interactive request would get
        self._door = frozenset(request.id for request in door.requests)
        first = sum(group.requests[0].request_class in self._first for group in groups)
        return [*groups[:first], door, *groups[first:]]

    def _note_waiting(self) -> None:
        if not self.interactive.entries:
            self._waiting_s = None
            self._balance = min(self._balance, 0.0)

    # Charges.

    def place(self, request_id: str, *, uncached: float) -> None:
        """Take out a request that goes to a worker now, and charge its tenant. Raises KeyError for one that does not wait."""
        if request_id in self.batch.entries:
            kept = request_id in self._door
            self.batch.place(request_id, uncached=uncached)
            if kept:
                self._balance -= (1.0 - self._share) * self.batch.charged
        else:
            self.interactive.place(request_id, uncached=uncached)
            self._note_waiting()
            if self.batch.entries:
                self._balance = min(self._balance + self._share * self.interactive.charged, _MOST_OWED)

    def unplace(self, request: Waiting, *, tokens: float) -> None:
        (self.batch if request.batch else self.interactive).unplace(request, tokens=tokens)

    def predicted_output(self, request: Waiting) -> float:
        most = request.max_tokens or MOST_TOKENS
        queue = self.batch if request.batch else self.interactive
        return queue.accounts.predicted_output(request.tenant, request.request_class, most)

    def correct(self, request_id: str, *, uncached: float) -> None:
        if not self.interactive.correct(request_id, uncached=uncached):
            self.batch.correct(request_id, uncached=uncached)

    def settle(self, request_id: str, *, output: float) -> None:
        if not self.interactive.settle(request_id, output=output):
            self.batch.settle(request_id, output=output)
