"""Tracks the leases of workers, routers and ingresses, and decides when one of them is gone.

The watch gives a cheap, slightly old view for choosing.  The verdict "gone", on which work is dropped or moved, always takes a
fresh read of the bucket.  A lease that was *deleted* is a verdict already: its holder has released it, a supervisor has reaped
the process, or a member has probed it in vain.  A lease that is only absent has run out, and in an outage of the broker the
leases of all members do.  So that is never a verdict within one lease TTL of this process's own (re)connect, the hold-down.

Where a cluster keeps the leases they last long, and what is missed first are renewals (`broker.membership.renewals`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode
from headrace.broker.errors import MalformedMessage, WireError
from headrace.broker.messages.members import RouterMember, WorkerMember
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.lease import lease_gone
from headrace.jetstream.ports import Change, Messaging
from headrace.jetstream.subjects import Subjects, check_token

# Finds the members whose leases are not renewed any more while those of others are.
#
# In a cluster of NATS servers leases outlast an election of their leader, during which none can be renewed. A member that is
# frozen or cut off is therefore not missed by its TTL alone. The watch tells every reader of each renewal; a member without
# one for some seconds is overdue, if the renewals of others came all the time.

GAP_S = 2.0  # the members renew every 1.3 s at least; if no renewal came for longer, the server took none


class Renewals:
    """The renewals of one deployment's leases, as one watch has reported them. Times are seconds on one monotonic clock."""

    def __init__(self, overdue_s: float) -> None:
        """`overdue_s`: the time without a renewal after which a member is overdue; 0 = never."""
        self._overdue_s = overdue_s
        self._last: dict[str, tuple[float, int]] = {}  # when the last renewal of a key came, and its revision
        self._latest = float("-inf")  # when any renewal came
        self._steady_since = float("-inf")  # renewals have come without a gap since then

    def note(self, key: str, revision: int, now: float) -> None:
        if now - self._latest > GAP_S:
            self._steady_since = now
        self._latest = now
        self._last[key] = (now, revision)

    def forget(self, key: str) -> None:
        self._last.pop(key, None)

    def overdue(self, key: str, now: float) -> int:
        """Return the revision of a lease that is overdue, and 0 for any other."""
        at, revision = self._last.get(key, (now, 0))
        if not self._overdue_s or now - self._latest > GAP_S or now - max(at, self._steady_since) < self._overdue_s:
            return 0
        return revision


ANY_WORKER = "*"  # the worker of a login that all workers of a pool use


def worker_id(name: str | None, login: str | None = None) -> str:
    """Return an id that is unique per process start: the given name, or a random one, plus an epoch.

    `login`: the id of the one worker that may use the process's login at the NATS server. It was made for this start.
    """
    if login and login != ANY_WORKER:
        return check_token(login, "worker of the login")
    base = check_token(name, "worker name") if name else f"w-{secrets.token_hex(3)}"
    return f"{base}-{int(time.time()):x}{secrets.token_hex(2)}"


# Tells whether a process of this machine is gone, which is a fact and no suspicion.
#
# Process ids mean something only to those who share them, so a worker announces with its lease where its id is valid.


def machine_id() -> str:
    """Return the name of this boot of the machine and of the namespace of process ids; empty if they are not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except (OSError, UnicodeDecodeError):
        return ""


def process_gone(pid: int) -> bool:
    """Return True if there is no process of this id, or one that has ended and waits to be reaped.

    False if that is not known, and while another process has got the same id.
    """
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    try:
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    return bool(after_name) and after_name[0] in (b"Z", b"X")


log = structlog.get_logger()

HIDE_EVERY_S = 0.5

_KEY = re.compile(r"(ingress|snapshots|(worker|router)\.[A-Za-z0-9_-]{1,64})\.[A-Za-z0-9_-]{1,64}\Z")


def drained_key(worker: str) -> str:
    """Return the key in the state bucket under which `worker` announces its drain. The entry outlives the worker's lease."""
    return f"drained.{worker}"


class Members:
    def __init__(self, messaging: Messaging, subjects: Subjects, *, lease_ttl_s: float, overdue_s: float = 0.0) -> None:
        """`overdue_s`: see `broker.settings.Timing`."""
        self.lease_ttl_s = lease_ttl_s
        self._messaging = messaging
        self._bucket = messaging.bucket(subjects.bucket("members"))
        self._subjects = subjects
        self._renewals = Renewals(overdue_s) if overdue_s else None
        self._values: dict[str, bytes] = {}
        self._workers: dict[str, dict[str, WorkerMember]] = {}
        self._serving: dict[str, tuple[WorkerMember, ...]] = {}  # as far as it was asked since the last change of the pool
        self._routers: dict[str, set[str]] = {}
        self._wakers: dict[str, set[str]] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._watch = self._bucket.watch(self._on_change)

    async def run(self) -> None:
        if self._renewals is None:
            await self._watch.run()
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch.run())
            tasks.create_task(self._hide_overdue_routers())

    async def ready(self, timeout_s: float) -> None:
        """Return once all leases that existed at the start have been read. Raises RequestTimeout."""
        await self._watch.ready(timeout_s)

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after every change of a worker's lease, and when another lease begins or ends.

        Returns what ends that. An error in it is logged, and keeps the change from nothing else.
        """
        self._callbacks.append(callback)

        def forget() -> None:
            with contextlib.suppress(ValueError):  # it was forgotten before
                self._callbacks.remove(callback)

        return forget

    def _on_change(self, change: Change) -> None:
        if change.kind == "missing" and (value := self._values.get(change.key)) is not None:
            # A server that was restarted has forgotten all leases; their holders write them again.
            asyncio.get_running_loop().call_later(self.lease_ttl_s, self._still_missing, change, value)
            return
        if self._renewals is not None:
            if change.value is None:
                self._renewals.forget(change.key)
            else:
                self._renewals.note(change.key, change.revision, asyncio.get_running_loop().time())
        self._apply(change)

    async def _hide_overdue_routers(self) -> None:
        """Let workers place requests on themselves as soon as no router renews its lease, not only when that has run out."""
        while True:
            await asyncio.sleep(HIDE_EVERY_S)
            for key in [key for key in self._values if key.startswith("router.") and self.overdue(key)]:
                log.warning("router.overdue", key=key)
                self._apply(Change(key, None, 0))  # its next renewal brings it back

    def overdue(self, key: str) -> int:
        """Return the revision of a lease that is not renewed any more although others are, and 0 for any other."""
        return self._renewals.overdue(key, asyncio.get_running_loop().time()) if self._renewals is not None else 0

    def _still_missing(self, change: Change, value: bytes) -> None:
        if self._values.get(change.key) is value:
            self._apply(change)

    def _apply(self, change: Change) -> None:
        kind, _, rest = change.key.partition(".")
        if not _KEY.match(change.key):
            metrics.MALFORMED.labels("member").inc()
            log.warning("member.unknown_key", key=change.key[:200])
            return
        before = change.key in self._values
        if change.value is None:
            self._values.pop(change.key, None)
        else:
            self._values[change.key] = change.value
        if kind == "router":
            pool, _, router = rest.partition(".")
            routers = self._routers.setdefault(pool, set())
            (routers.discard if change.value is None else routers.add)(router)
            wakers = self._wakers.setdefault(pool, set())
            (wakers.add if change.value is not None and _wakes(change.value) else wakers.discard)(router)
        if kind == "worker":
            self._on_worker(rest, change.value)
        elif before == (change.value is not None):
            return  # a renewed lease of a router or ingress changes nothing
        for callback in list(self._callbacks):
            try:
                callback()
            except Exception as error:  # of one pool, maybe: the parts of others have to learn of the change
                metrics.FAILED_MESSAGES.labels("lease").inc()
                log.exception("members.callback_failed", key=change.key, error=str(error))

    def _on_worker(self, rest: str, value: bytes | None) -> None:
        pool, _, worker = rest.partition(".")
        members = self._workers.setdefault(pool, {})
        self._serving.pop(pool, None)
        if value is None:
            members.pop(worker, None)
            return
        try:
            member = decode(WorkerMember, value)
            if (member.pool, member.worker) != (pool, worker):
                raise MalformedMessage(f"it says that it is {member.worker!r} of pool {member.pool!r}")
            members[worker] = member
        except WireError as error:
            metrics.MALFORMED.labels("member").inc()
            members.pop(worker, None)
            log.warning("member.malformed", worker=worker, pool=pool, error=str(error))

    def pools(self) -> list[str]:
        return [pool for pool, workers in self._workers.items() if workers]

    def workers(self, pool: str) -> dict[str, WorkerMember]:
        return self._workers.get(pool, {})

    def ready_workers(self, pool: str) -> list[WorkerMember]:
        return [member for member in self.workers(pool).values() if not member.draining]

    def serving_workers(self, pool: str) -> Sequence[WorkerMember]:
        """Return the workers that accept requests, computed once per change, because each request reads them."""
        serving = self._serving.get(pool)
        if serving is None:
            serving = self._serving[pool] = tuple(member for member in self.ready_workers(pool) if member.serves)
        return serving

    def having(self, pool: str, adapter: str | None) -> Sequence[WorkerMember]:
        workers = self.serving_workers(pool)
        return [member for member in workers if adapter in member.adapters] if adapter else workers

    def sleeping_workers(self, pool: str, adapter: str | None = None) -> list[WorkerMember]:
        asleep = [member for member in self.workers(pool).values() if member.sleeping and member.serves]
        return [member for member in asleep if adapter in member.adapters] if adapter else asleep

    def answerable(self, pool: str, adapter: str | None = None) -> bool:
        return bool(self.having(pool, adapter) or (self._wakers.get(pool) and self.sleeping_workers(pool, adapter)))

    def waking(self, pool: str, adapter: str | None = None) -> bool:
        return any(member.waking for member in self.sleeping_workers(pool, adapter))

    def prefill_workers(self, pool: str, handover: str, adapter: str | None = None) -> list[WorkerMember]:
        if not handover:
            return []
        able = [m for m in self.ready_workers(pool) if m.role == "prefill" and m.handover == handover]
        return [member for member in able if adapter in member.adapters] if adapter else able

    def encode_workers(self, pool: str, encoder: str) -> list[WorkerMember]:
        return [m for m in self.ready_workers(pool) if m.role == "encode" and encoder and m.encoder == encoder]

    def worker_live(self, pool: str, worker: str) -> bool:
        return self._subjects.worker_key(pool, worker) in self._values

    def has_router(self, pool: str) -> bool:
        return bool(self._routers.get(pool))

    def routers(self, pool: str) -> frozenset[str]:
        return frozenset(self._routers.get(pool, ()))

    def ingresses(self) -> list[str]:
        return [key.removeprefix("ingress.") for key in self._values if key.startswith("ingress.")]

    def ingress_live(self, ingress: str) -> bool:
        return f"ingress.{ingress}" in self._values

    async def gone(self, key: str) -> bool:
        """Return True if the holder of this lease is gone, by a fresh read; False while that cannot be known."""
        if not self._messaging.connected:
            return False
        hold_down = asyncio.get_running_loop().time() - self._messaging.connected_since_s < self.lease_ttl_s
        try:
            return await lease_gone(self._bucket, key, ttl_s=self.lease_ttl_s, hold_down=hold_down)
        except JetStreamError as error:
            log.debug("lease.unreadable", key=key, error=str(error))
            return False

    async def worker_gone(self, pool: str, worker: str) -> bool:
        return await self.gone(self._subjects.worker_key(pool, worker))

    async def ingress_gone(self, ingress: str) -> bool:
        return await self.gone(self._subjects.ingress_key(ingress))


def _wakes(value: bytes) -> bool:
    try:
        return decode(RouterMember, value).wakes
    except WireError:
        return False
