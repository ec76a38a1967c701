"""The state of one worker session, without I/O: its runs, its announced member record, and what it may take.

The parts of the session share this object and the ports they use; none of them knows the session.  Everything happens on one
event loop, so the state is consistent between two awaits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from headrace.broker.messages import WorkerMember
from headrace.broker.protocol.runs import RunTable, Tombstones

PLACED_FORGOTTEN_S = 10.0  # after so long a placed request that never arrived gives its slot back


class AdaptersUsed:
    """The order in which adapters that were loaded while the worker serves were last asked for."""

    def __init__(self) -> None:
        self._order: dict[str, None] = {}

    def loaded(self, name: str) -> None:
        self._order.pop(name, None)
        self._order[name] = None

    def used(self, name: str) -> None:
        """Note a request for an adapter. Those of the worker's start are not kept here: they stay loaded."""
        if name in self._order:
            self.loaded(name)

    def unloaded(self, name: str) -> None:
        self._order.pop(name, None)

    def least_recent_first(self) -> tuple[str, ...]:
        return tuple(self._order)


class WorkerState:
    """The state of one worker of one pool.

    * `member`: the record that the worker announces with its lease; replaced by `update_member`.
    * `draining`: a drain or the death of the engine was announced; the worker takes no more work, for good.
    * `withdrawn`: why the worker takes nothing for a while: it changes its role, sleeps or is paused; empty = it is in service.
    * `engine_dead`: no run can be started.
    * `unloading`: adapters that are no longer announced, but still in the engine.
    * `adapters_used`: those that were loaded while the worker serves, in the order of their last use.
    """

    def __init__(self, member: WorkerMember, *, slots: int, tombstone_s: float) -> None:
        """`tombstone_s`: how long a cancelled request id is remembered."""
        self.worker = member.worker
        self.pool = member.pool
        self.member = member
        self.slots = slots
        self.runs = RunTable()
        self.tombstones = Tombstones(keep_s=tombstone_s)
        self.draining = False
        self.withdrawn: Literal["", "role", "sleep", "pause"] = ""
        self.engine_dead = False
        self.unloading: set[str] = set()
        self.adapters_used = AdaptersUsed()
        self._placed: dict[tuple[str, int], float] = {}  # id and attempt → when the worker placed it on itself
        self._callbacks: list[Callable[[], None]] = []
        self._load_callbacks: list[Callable[[], None]] = []

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every change of what the worker may take. It must be cheap: runs come and go often."""
        self._callbacks.append(callback)

    def on_load_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the next load report will differ, though the worker may take no more and no less."""
        self._load_callbacks.append(callback)

    def changed(self) -> None:
        """Say that a slot, a permission or the lease has changed."""
        for callback in self._callbacks:
            callback()

    def load_changed(self) -> None:
        """Say that the engine's load has changed."""
        for callback in self._load_callbacks:
            callback()

    def update_member(self, **changes: Any) -> None:
        """Change fields of the member record. The caller announces it."""
        self.member = msgspec.structs.replace(self.member, **changes)

    @property
    def taking(self) -> bool:
        """True while new work is taken: the worker neither leaves nor is withdrawn."""
        return not self.draining and not self.withdrawn

    @property
    def open_slots(self) -> int:
        """The slots of the engine for ordinary jobs; 0 while the worker is on trial."""
        return 0 if self.runs.on_trial else self.slots

    @property
    def free_slots(self) -> int:
        """Slots that no run holds; on trial those that more suspects may take. Negative: more sequences than slots."""
        free = self.slots - self.runs.sequences
        return min(free, self.runs.group_limit - len(self.runs.suspects)) if self.runs.on_trial else free

    @property
    def room(self) -> int:
        """Free slots that no request on its way to this worker needs either; none on trial."""
        return 0 if self.runs.on_trial else self.free_slots - len(self._placed)

    def usable(self, adapter: str) -> bool:
        """Return True if the engine has this adapter, or none is needed."""
        return not adapter or adapter in self.member.adapters or adapter in self.unloading

    # Requests that the worker places on itself, on their way from REQ to its own consumer.

    def placed(self, request_id: str, attempt: int, now_s: float) -> None:
        """Keep a slot for a request until it arrives."""
        self._placed[request_id, attempt] = now_s

    def arrived(self, request_id: str, attempt: int) -> None:
        """Free the slot that was kept for a request: it is here, and its run holds one, or it does not come."""
        self._placed.pop((request_id, attempt), None)

    def forget_placed(self, now_s: float) -> None:
        """Free the slots of placed requests that have not arrived within `PLACED_FORGOTTEN_S`."""
        for key, since_s in list(self._placed.items()):
            if now_s - since_s > PLACED_FORGOTTEN_S:
                del self._placed[key]
