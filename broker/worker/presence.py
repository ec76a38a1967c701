"""The presence of a worker in its pool: the record that it announces, its lease, and the processes that it sees.

Everything of a session happens on one event loop, so this state is consistent between two awaits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal

import msgspec
import structlog

from headrace.broker import metrics
from headrace.broker.codec import encode
from headrace.broker.dead_letters import until_done
from headrace.broker.membership.failure_detector import FailureDetector
from headrace.broker.membership.members import Members, drained_key
from headrace.broker.membership.mover import Janitor, Mover, rendezvous_first
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.requests import Record
from headrace.broker.worker.ports import KvPort
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.lease import LeaseKeeper

log = structlog.get_logger()

Reason = Literal["role", "sleep", "pause"]
_STANDS = {"role": "is changing its role", "sleep": "sleeps: wake it first", "pause": "is paused: resume it first"}
_SHOWN = ("role", "name", "level", "action", "grace_s")  # not the source of an adapter: an address may have a password in it


class Presence:
    """The part that one worker takes in its pool.

    * `member`: the record that is announced with the lease.
    * `taking`: it takes work. Not so once it is `draining`, for good, or while it is `withdrawn` for a reason.
    * `unloading`: adapters that are no longer announced, but still in the engine.
    * `members`: the leases of others as last seen.

    The cache events (`kv`) are published under the lease, so they start and stop with it.
    """

    def __init__(self, deps: WorkerDeps, member: WorkerMember, kv: KvPort | None = None) -> None:
        self.worker = member.worker
        self.pool = member.pool
        self.member = member
        self.serves = member.serves
        self.taking = True
        self.draining = False
        self.withdrawn: Reason | Literal[""] = ""
        self.unloading: set[str] = set()
        self.kv = kv
        self._deps = deps
        self._records = deps.messaging.bucket(deps.subjects.bucket("state"))
        self._on_change: list[Callable[[], None]] = []
        self._on_lapse: list[Callable[[], None]] = []
        messaging, subjects, timing = deps.messaging, deps.subjects, deps.timing
        self.lease = LeaseKeeper(
            messaging,
            subjects.bucket("members"),
            subjects.worker_key(self.pool, self.worker),
            encode(member),
            ttl_s=timing.lease_ttl_s,
            on_change=self._lease_changed,
        )
        self.members = Members(messaging, subjects, lease_ttl_s=timing.lease_ttl_s, overdue_s=timing.overdue_s)
        self.mover = Mover(messaging, subjects, pool=self.pool, timing=timing, wall=deps.wall)
        self._janitor = Janitor(messaging, subjects, self.members, self.mover, pool=self.pool, timing=timing)
        self.members.on_change(self.changed)
        self.members.on_change(self._janitor.wake)

    def parts(self) -> list[Coroutine[Any, Any, None]]:
        """Return what runs until the worker has left."""
        deps = self._deps
        parts = [self.lease.run(), self.members.run(), self._janitor.run(self.cleans_up)]
        if deps.revokes:
            detector = FailureDetector(
                deps.messaging, deps.subjects, self.members, pool=self.pool, me=self.worker, ttl_s=deps.timing.lease_ttl_s
            )
            parts.append(detector.run())
        if self.kv is not None:
            parts.append(self.kv.run(lambda: self.lease.held))
        return parts

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the worker may take more or less than before."""
        self._on_change.append(callback)

    def changed(self) -> None:
        for callback in self._on_change:
            callback()

    def on_lapse(self, callback: Callable[[], None]) -> None:
        self._on_lapse.append(callback)

    def _lease_changed(self, held: bool) -> None:
        if held:
            self.changed()
            if self.kv is not None:
                self.kv.lease_gained()
            return
        metrics.LEASE_LAPSES.labels("worker").inc()
        if self.kv is not None:
            self.kv.lease_lapsed()
        for callback in self._on_lapse:
            callback()
        self.changed()

    def usable(self, adapter: str) -> bool:
        return not adapter or adapter in self.member.adapters or adapter in self.unloading

    def cleans_up(self) -> bool:
        """Return whether this worker moves ownerless work: it is the rendezvous-first live worker, and there is no router."""
        if not self.lease.held or self.members.has_router(self.pool):
            return False
        ready = self.members.ready_workers(self.pool)
        # A worker that has just started may not call others gone yet; if clocks differ, two act, which does no harm.
        before = self._deps.wall() - self._deps.timing.lease_ttl_s
        able = [member.worker for member in ready if member.started <= before] or [member.worker for member in ready]
        return rendezvous_first(self.pool, able or [self.worker]) == self.worker

    # -- leaving and coming back -------------------------------------------------------------------------------

    def leave(self) -> None:
        """Take no more work, for good."""
        self.draining = True
        self.taking = False
        self.changed()

    def withdraw(self, reason: Reason) -> None:
        """Take no more work until `return_to_service`, but keep the lease."""
        self.withdrawn = reason
        self.taking = False

    def return_to_service(self) -> None:
        self.withdrawn = ""
        self.taking = not self.draining
        self.changed()

    @property
    def refusal(self) -> str:
        """Return why nothing else can be done with this worker now, or an empty string."""
        if self.draining:
            return f"worker {self.worker} is draining"
        return f"worker {self.worker} {_STANDS[self.withdrawn]}" if self.withdrawn else ""

    async def announce(self, **changes: Any) -> None:
        """Change fields of the record and publish it. A drain that begins meanwhile announces itself."""
        if self.draining:
            changes.pop("draining", None)
        self._update(**changes)
        await self.until_done(self._publish, event=f"{self.withdrawn or 'worker'}.retry")

    async def announce_drain(self) -> None:
        """Announce before anything is moved that this worker leaves, so that no mover takes it for a crash.

        The record in the bucket outlives the lease.
        """

        async def announce() -> None:
            await self._records.put(drained_key(self.worker), b"1")
            self._update(draining=True)
            await self._publish()

        await until_done(announce, event="drain.retry", retry_s=self._deps.timing.retry_s, worker=self.worker)

    async def announce_adapters(self, adapters: list[str]) -> None:
        self._update(adapters=adapters)
        await self.until_done(self._publish, event="adapter.retry")

    async def until_done(self, attempt: Callable[[], Awaitable[object]], *, event: str) -> None:
        """Try until it succeeds, or a drain begins."""
        retry_s = self._deps.timing.retry_s
        await until_done(attempt, event=event, retry_s=retry_s, wanted=lambda: not self.draining, worker=self.worker)

    def _update(self, **changes: Any) -> None:
        self.member = msgspec.structs.replace(self.member, **changes)
        self.serves = self.member.serves

    async def _publish(self) -> None:
        await self.lease.update(encode(self.member))

    def note_command(self, command: Record) -> None:
        """Log an operator's command before it is carried out, for the audit log. NATS does not name the sender."""
        fields = {key: value for key in _SHOWN if (value := getattr(command, key, None)) is not None}
        tag = command.__struct_config__.tag
        log.warning("audit.worker_command", command=tag, worker=self.worker, pool=self.pool, model=self.member.model, **fields)
