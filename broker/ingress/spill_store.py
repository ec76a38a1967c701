"""Keeps the payloads that are too large for a message while their requests are open, in bounded room.

A payload is stored before its request and deleted once that has ended, except for one with a dead letter, which may be run
again for as long as the payload lives.  What a frontend that died has left is swept by the others.  The store has a cap; at the
cap a request is refused before anything of it is stored.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import structlog

from headrace.broker import metrics
from headrace.broker.dead_letters import note_failure
from headrace.broker.errors import BrokerUnavailable, Overloaded, RequestTooLarge
from headrace.broker.membership.members import Members
from headrace.broker.messages.requests import Spill
from headrace.broker.spill import seal, sha256_hex
from headrace.jetstream.errors import DiskFull, JetStreamError, QueueFull, SubjectError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope

log = structlog.get_logger()

TTL_S = 2 * 3600.0  # at least; the backstop for what is never deleted
SWEEP_S = 600.0
ORPHAN_S = 600.0  # age of a payload that is swept: a new frontend may not be seen yet
FULL_RETRY_AFTER_S = 5.0
OVERHEAD = 1.05  # of a stored object over its content


class SpillStore:
    """The payloads of one ingress's requests. Objects are named `<ingress>/<request>`."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        members: Members,
        tasks: TaskScope,
        *,
        ingress: str,
        sealed: bool = False,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Deletions that are not awaited run in `tasks`. `sealed`: payloads are encrypted. `wall` gives Unix time."""
        self._sealed = sealed
        self._messaging = messaging
        self._stream = f"OBJ_{subjects.bucket('spill')}"
        self._store = messaging.objects(subjects.bucket("spill"))
        self._members = members
        self._tasks = tasks
        self._ingress = ingress
        self._wall = wall
        self._held: set[str] = set()  # requests with a payload here
        self._kept: set[str] = set()  # of these, requests with a dead letter

    async def put(self, request_id: str, payload: bytes, *, largest: int, ttl_s: float) -> Spill:
        """Store a payload for a request. `largest`: bytes of one; `ttl_s`: as long as the request may wait.

        Raises RequestTooLarge, Overloaded if the store is full, BrokerUnavailable.
        """
        if len(payload) > largest:
            raise RequestTooLarge(f"the request takes {len(payload)} bytes; the limit is {largest}")
        name = f"{self._ingress}/{request_id}"
        try:
            await self._check_room(len(payload))
            self._held.add(request_id)
            key, stored = await seal(payload) if self._sealed else (b"", payload)
            await self._store.put(name, stored, ttl_s=max(TTL_S, ttl_s))
        except (QueueFull, DiskFull) as error:  # others were faster
            self.forget(request_id)
            raise _full() from error
        except JetStreamError as error:
            self.forget(request_id)
            raise BrokerUnavailable(f"a large request could not be stored: {error}") from error
        metrics.SPILLED_BYTES.inc(len(payload))
        return Spill(object=name, size=len(payload), digest=await sha256_hex(payload), key=key)

    async def _check_room(self, size: int) -> None:
        state = await self._messaging.stream_state(self._stream)
        metrics.SPILL_STORE_BYTES.set(state.bytes)
        if 0 < state.max_bytes < state.bytes + size * OVERHEAD:
            raise _full()

    def keep(self, request_id: str) -> None:
        """Leave a payload to its time to live, because there is a dead letter of its request."""
        if request_id in self._held:
            self._kept.add(request_id)

    def forget(self, request_id: str) -> None:
        if request_id not in self._held:
            return
        self._held.discard(request_id)
        if request_id in self._kept:
            self._kept.discard(request_id)
        elif self._tasks.is_open:
            deleting = self._delete(f"{self._ingress}/{request_id}", "ended")
            self._tasks.spawn_guarded(deleting, lambda error: note_failure("spill", error))

    async def _delete(self, name: str, how: str) -> None:
        try:
            await self._store.delete(name, ttl_s=1.0)
        except JetStreamError as error:  # its time to live ends it
            log.info("spill.not_deleted", object=name, error=str(error))
            return
        metrics.SPILLS_DELETED.labels(how).inc()

    async def run(self, may_act: Callable[[], bool]) -> None:
        """Sweep from time to time until cancelled, while `may_act()` is True. Several frontends may."""
        while True:
            await asyncio.sleep(SWEEP_S * (0.5 + random.random()))  # noqa: S311 - it spreads the load
            if may_act():
                try:
                    await self.sweep()
                except JetStreamError as error:
                    log.info("spill.not_swept", error=str(error))
                except Exception as error:  # an object that nothing foresaw must not end the frontend
                    note_failure("spill", error)

    async def sweep(self) -> int:
        """Delete the payloads of frontends that are gone. Returns their number. Raises JetStreamError."""
        gone: dict[str, bool] = {}
        removed = 0
        for found in await self._store.list():
            ingress, mark, _ = found.name.partition("/")
            if not mark or self._wall() - found.stored < ORPHAN_S:
                continue
            if ingress not in gone:
                gone[ingress] = await self._is_gone(ingress)
            if gone[ingress]:
                await self._delete(found.name, "orphan")
                removed += 1
        if removed:
            log.info("spill.swept", objects=removed)
        return removed

    async def _is_gone(self, ingress: str) -> bool:
        try:
            return not self._members.ingress_live(ingress) and await self._members.ingress_gone(ingress)
        except SubjectError:  # no process can have that name
            return True


def _full() -> Overloaded:
    metrics.SPILL_REFUSED.inc()
    message = "the store of large requests is full; try again when others have ended"
    return Overloaded(message, reason="spill_full", retry_after_s=FULL_RETRY_AFTER_S)
