"""Who sends cache events, and how far each sender has been read: members, strangers, and whose inventory is wanted."""

from __future__ import annotations

import structlog

from headrace.router.index.types import CacheView
from headrace.router.kv_events import metrics
from headrace.router.kv_events.inventory import NO_EPOCH, WorkerState
from headrace.router.kv_events.log_throttle import LogThrottle

log = structlog.get_logger(__name__)

STRANGER_S = 4.0  # as long as a lease lives
MAX_STRANGERS = 4096
FIRST_ASK_S = 1.0  # a worker that has just begun sends its first event by itself
ASK_AGAIN_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
PART_S = 2.0  # an inventory is under way as long as its parts follow each other within this


class KvEventSources:
    """*Strangers* are senders that are no members (yet): a worker's events may come before its lease is seen, and a snapshot
    knows workers whose leases have not been listed yet.  They are kept like everybody else, so that nothing has to be asked
    for when they turn out to be members, and dropped when they have not within `STRANGER_S` after the members were listed.
    Members that leave become strangers too: a lease that is back after a second costs no inventory.

    Asking goes to members only, soon after a loss, then ever more rarely until an inventory comes.  The answer goes through the
    stream, so one ask repairs every reader.
    """

    def __init__(self, view: CacheView, *, pool: str) -> None:
        self.pool = pool
        self._view = view
        self._states: dict[str, WorkerState] = {}
        self._strangers = 0
        self._listed_s: float | None = None
        self._complaints = LogThrottle()

    # members ----------------------------------------------------------------------------------------------------------------
    def put_worker(self, worker: str, now_s: float, *, sends_events: bool = True) -> None:
        """It is a member; its inventory is wanted unless all its events are known. Saying it again changes nothing.

        The view need not hear of it from here before its first event: how to guess the cache of a worker without events is
        for others to say. `sends_events` false: it is not asked for an inventory before there was an event.
        """
        state = self._states.get(worker)
        if state is None:
            self._states[worker] = WorkerState(member=True, sends_events=sends_events, next_ask_s=now_s + FIRST_ASK_S)
        elif not state.member:
            state.member = True
            self._strangers -= 1
            state.next_ask_s, state.asks = now_s + FIRST_ASK_S, 0
        self._count()

    def distrust(self, worker: str) -> None:
        """Its blocks in the view are no longer those of its events (they were guessed for a while): the next event is a new
        beginning. Fine when unknown."""
        state = self._states.get(worker)
        if state is not None:
            state.previous = state.epoch = NO_EPOCH
            state.n, state.complete, state.wanted, state.gathering = -1, False, True, None
            self._count()

    def remove_worker(self, worker: str, now_s: float) -> None:
        """It is a member no longer. Its blocks go a moment later, unless it comes back."""
        state = self._states.get(worker)
        if state is not None and state.member:
            state.member = False
            state.stranger_since_s = now_s
            self._strangers += 1
            self._count()

    def members_listed(self, now_s: float) -> None:
        """All members have been put; from now on strangers are not waited for any longer than usual."""
        if self._listed_s is None:
            self._listed_s = now_s

    def expire(self, now_s: float) -> list[str]:
        """Drop strangers that did not become members in time; returns them. Call it every second or so."""
        if self._listed_s is None or not self._strangers:
            return []
        gone = [
            worker
            for worker, state in self._states.items()
            if not state.member
            and now_s - max(state.stranger_since_s, self._listed_s) >= STRANGER_S
            and worker not in self._held_fast()
        ]
        for worker in gone:
            self._forget(worker)
        if gone:
            log.info("kv.strangers_dropped", pool=self.pool, workers=gone)
        return gone

    def _held_fast(self) -> tuple[str, ...]:
        """Workers that must not be dropped just now."""
        return ()

    # what is known ------------------------------------------------------------------------------------------------------------
    def workers(self) -> list[str]:
        """All of whom something is known, strangers too."""
        return [worker for worker, state in self._states.items() if state.epoch != NO_EPOCH]

    def known(self, worker: str) -> tuple[int, int] | None:
        """(epoch, n) of the last message read from it."""
        state = self._states.get(worker)
        return None if state is None or state.epoch == NO_EPOCH else (state.epoch, state.n)

    def complete(self, worker: str) -> bool:
        """The index has all its blocks."""
        state = self._states.get(worker)
        return state is not None and state.complete

    # inventories ------------------------------------------------------------------------------------------------------------
    def asks(self, now_s: float) -> list[str]:
        """The workers to be asked for their inventory now."""
        due = []
        for worker, state in self._states.items():
            if not (state.member and state.wanted and state.sends_events) or now_s < state.next_ask_s:
                continue
            if state.gathering is not None and now_s - state.gathering.at_s < PART_S:
                continue
            state.next_ask_s = now_s + ASK_AGAIN_S[min(state.asks, len(ASK_AGAIN_S) - 1)]
            state.asks += 1
            metrics.ASKS.inc()
            due.append(worker)
        return due

    def _want(self, state: WorkerState, now_s: float) -> None:
        """Its inventory: ask at once, unless that has been going on for a while."""
        if not state.wanted:
            state.wanted, state.next_ask_s, state.asks = True, now_s, 0
        self._count()

    # states -----------------------------------------------------------------------------------------------------------------
    def _refuse(self, worker: str, reason: str, text: str, now_s: float) -> None:
        metrics.REFUSED.labels(reason).inc()
        self._complaints.warn("kv.refused", now_s, pool=self.pool, worker=worker, reason=reason, error=text)

    def _state(self, worker: str, now_s: float) -> WorkerState | None:
        state = self._states.get(worker)
        if state is not None:
            return state
        if self._strangers >= MAX_STRANGERS:
            self._refuse(worker, "too_many_strangers", f"{self._strangers} senders that are no members", now_s)
            return None
        state = self._states[worker] = WorkerState(stranger_since_s=now_s)
        self._strangers += 1
        self._count()
        return state

    def _forget(self, worker: str) -> None:
        del self._states[worker]
        self._strangers -= 1
        self._view.drop_worker(worker)
        self._count()

    def _count(self) -> None:
        metrics.STRANGERS.labels(self.pool).set(self._strangers)
        wanted = sum(1 for state in self._states.values() if state.wanted and state.member)
        metrics.INCOMPLETE.labels(self.pool).set(wanted)
