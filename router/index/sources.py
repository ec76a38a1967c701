"""Senders of cache events: members and strangers, how far each was read, and which inventories are wanted."""

from __future__ import annotations

from collections.abc import Container

import structlog

from headrace.router.index import inventory
from headrace.router.index.inventory import NO_EPOCH, SourceState
from headrace.router.index.types import CacheView

log = structlog.get_logger(__name__)

AGAIN_S = 10.0
REMEMBERED = 1024


class LogThrottle:
    """Logs one line per event, worker and reason every `AGAIN_S`, with the number of lines left out."""

    def __init__(self) -> None:
        self._logged: dict[tuple[str, str, str], tuple[float, int]] = {}

    def warn(self, event: str, now_s: float, *, worker: str, **fields: object) -> None:
        key = (event, worker, str(fields.get("reason", "")))
        logged = self._logged.get(key)
        if logged is not None and now_s - logged[0] < AGAIN_S:
            self._logged[key] = (logged[0], logged[1] + 1)
            return
        if logged is None and len(self._logged) >= REMEMBERED:
            del self._logged[next(iter(self._logged))]
        self._logged[key] = (now_s, 0)
        log.warning(event, worker=worker, **fields, **({"left_out": logged[1]} if logged and logged[1] else {}))


STRANGER_S = 4.0  # as long as a lease lives
MAX_STRANGERS = 4096
FIRST_ASK_S = 1.0  # a worker that has just begun sends its first event by itself
ASK_AGAIN_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
PART_S = 2.0  # an inventory is under way as long as its parts follow each other within this


class KvEventSources:
    """The senders of one pool.

    *Strangers* are senders that are no members (yet): a worker's events may come before its lease is seen, and a snapshot
    knows workers whose leases have not been listed yet.  They are kept like members, so that nothing has to be asked
    for when they turn out to be members, and dropped when they have not within `STRANGER_S` after the members were listed.
    Members that leave become strangers too: a lease that is back after a second costs no inventory.

    Asking goes to members only, soon after a loss, then ever more rarely until an inventory comes.  The answer goes through the
    stream, so one ask repairs every reader.
    """

    def __init__(self, view: CacheView, *, pool: str) -> None:
        self.pool = pool
        self._view = view
        self._states: dict[str, SourceState] = {}
        self._strangers = 0
        self._listed_s: float | None = None
        self._complaints = LogThrottle()

    def put_worker(self, worker: str, now_s: float, *, sends_events: bool = True) -> None:
        """Count the worker as a member. Its inventory is wanted unless all its events are known. Repeating it changes nothing.

        The view is not told before the first event, because the roster says how to guess the cache of a worker without events.
        With `sends_events` false the worker is not asked for an inventory before there was an event.
        """
        state = self._states.get(worker)
        if state is None:
            self._states[worker] = SourceState(member=True, sends_events=sends_events, next_ask_s=now_s + FIRST_ASK_S)
        elif not state.member:
            state.member = True
            self._strangers -= 1
            state.next_ask_s, state.asks = now_s + FIRST_ASK_S, 0
        self.count()

    def distrust(self, worker: str) -> None:
        """Take the worker's next event for a new beginning, because its blocks in the view were guessed for a while.

        An unknown worker is ignored.
        """
        state = self._states.get(worker)
        if state is not None:
            state.previous = state.epoch = NO_EPOCH
            state.n, state.complete, state.wanted, state.gathering = -1, False, True, None
            self.count()

    def remove_worker(self, worker: str, now_s: float) -> None:
        """Count the worker as a stranger. Its blocks go a moment later, unless it becomes a member again."""
        state = self._states.get(worker)
        if state is not None and state.member:
            state.member = False
            state.stranger_since_s = now_s
            self._strangers += 1
            self.count()

    def members_listed(self, now_s: float) -> None:
        """Note that all members have been put. From now on strangers are kept no longer than `STRANGER_S`."""
        if self._listed_s is None:
            self._listed_s = now_s

    def expire(self, now_s: float, *, in_use: Container[str] = ()) -> list[str]:
        """Drop strangers that did not become members in time and are not `in_use`, and return them."""
        if self._listed_s is None or not self._strangers:
            return []
        gone = [
            worker
            for worker, state in self._states.items()
            if not state.member and now_s - max(state.stranger_since_s, self._listed_s) >= STRANGER_S and worker not in in_use
        ]
        for worker in gone:
            self.drop(worker)
        if gone:
            log.info("kv.strangers_dropped", pool=self.pool, workers=gone)
        return gone

    # Reading positions.

    def workers(self) -> list[str]:
        return [worker for worker, state in self._states.items() if state.epoch != NO_EPOCH]

    def known(self, worker: str) -> tuple[int, int] | None:
        state = self._states.get(worker)
        return None if state is None or state.epoch == NO_EPOCH else (state.epoch, state.n)

    def complete(self, worker: str) -> bool:
        state = self._states.get(worker)
        return state is not None and state.complete

    # Inventories.

    def asks(self, now_s: float) -> list[str]:
        due = []
        for worker, state in self._states.items():
            if not (state.member and state.wanted and state.sends_events) or now_s < state.next_ask_s:
                continue
            if state.gathering is not None and now_s - state.gathering.at_s < PART_S:
                continue
            state.next_ask_s = now_s + ASK_AGAIN_S[min(state.asks, len(ASK_AGAIN_S) - 1)]
            state.asks += 1
            inventory.ASKS.inc()
            due.append(worker)
        return due

    def want_inventory(self, state: SourceState, now_s: float) -> None:
        """Want the inventory of this worker and ask for it at once. If it is wanted already, the schedule of asks goes on."""
        if not state.wanted:
            state.wanted, state.next_ask_s, state.asks = True, now_s, 0
        self.count()

    def gathered_blocks(self) -> int:
        return sum(state.gathering.size for state in self._states.values() if state.gathering is not None)

    # States of single senders.

    def refuse(self, worker: str, reason: str, text: str, now_s: float) -> None:
        inventory.REFUSED.labels(reason).inc()
        self._complaints.warn("kv.refused", now_s, pool=self.pool, worker=worker, reason=reason, error=text)

    def warn_gap(self, worker: str, missing: str, now_s: float) -> None:
        self._complaints.warn("kv.gap", now_s, pool=self.pool, worker=worker, missing=missing)

    def states(self) -> list[tuple[str, SourceState]]:
        return list(self._states.items())

    def get(self, worker: str) -> SourceState | None:
        return self._states.get(worker)

    def restart(self, worker: str, old: SourceState, now_s: float) -> None:
        self._states[worker] = SourceState(member=True, sends_events=old.sends_events, next_ask_s=now_s)

    def admit(self, worker: str, now_s: float) -> SourceState:
        """Return the state of a sender from a snapshot: a stranger if it is unknown."""
        state = self._states.get(worker)
        if state is None:
            state = self._states[worker] = SourceState(stranger_since_s=now_s)
            self._strangers += 1
        return state

    def state_of(self, worker: str, now_s: float) -> SourceState | None:
        """Return the state of a message's sender: a new stranger if it is unknown; None if there are too many strangers."""
        state = self._states.get(worker)
        if state is not None:
            return state
        if self._strangers >= MAX_STRANGERS:
            self.refuse(worker, "too_many_strangers", f"{self._strangers} senders that are no members", now_s)
            return None
        state = self._states[worker] = SourceState(stranger_since_s=now_s)
        self._strangers += 1
        self.count()
        return state

    def drop(self, worker: str) -> None:
        del self._states[worker]
        self._strangers -= 1
        self._view.drop_worker(worker)
        self.count()

    def count(self) -> None:
        inventory.STRANGERS.labels(self.pool).set(self._strangers)
        wanted = sum(1 for state in self._states.values() if state.wanted and state.member)
        inventory.INCOMPLETE.labels(self.pool).set(wanted)
