"""Leases: keys with a TTL, renewed by compare-and-set, whose holder knows when they have lapsed.

`LeaseClock` is the timing, without I/O. `LeaseKeeper` drives it against a bucket and needs only `ports.Bucket` and the loop's
clock, so it runs unchanged over a simulated server.

The rule of self-fencing: a renewal counts from the moment it was *sent*, because the server cannot have started the TTL
earlier. So the holder stops before other processes can see the lease as gone, never after.

The rule of a young bucket: a bucket in memory is empty after each restart of the server, so for one TTL after it was made the
absence of a key means nothing, and no process may act on it. That is at least as long as any holder can believe in a lease of
the bucket before, so a holder that finds no record of its key writes it again and continues without a lapse.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

import structlog

from headrace.jetstream import metrics
from headrace.jetstream.errors import JetStreamError, LeaseLost, RequestTimeout, RevisionConflict
from headrace.jetstream.ports import Bucket, Messaging

log = structlog.get_logger(__name__)

T = TypeVar("T")

RENEWALS_PER_TTL = 3
RETRIES_PER_TTL = 16
CALLS_PER_TTL = 4  # a call may take at most TTL / CALLS_PER_TTL, unless the server is known to be slower
SLOW_CALLS_PER_TTL = 2  # and then this part of the TTL
PACE_MOST_S = 4.0  # a longer lease is written as often as one of this TTL, so that nearly all of it is left at any time


class LeaseClock:
    """Decides when a lease is held, due for renewal, or lapsed. All times are seconds on one monotonic clock."""

    __slots__ = ("_confirmed", "_hurried", "_retry_at", "expires", "pace_s", "ttl_s")

    def __init__(self, ttl_s: float) -> None:
        if not ttl_s > 0:
            raise ValueError(f"a lease needs a positive TTL, got {ttl_s!r}")
        self.ttl_s = ttl_s
        self.pace_s = min(ttl_s, PACE_MOST_S)
        self.expires: float | None = None  # when it lapses unless renewed; None: not held, as far as the caller has been told
        self._confirmed = 0.0
        self._retry_at = 0.0
        self._hurried = False

    def held(self, now: float) -> bool:
        return self.expires is not None and now < self.expires

    def confirmed(self, sent_at: float, now: float) -> Literal["gained", "renewed", "lapsed", "late"]:
        """Note that a write sent at `sent_at` is confirmed at `now`, and return its effect.

        `lapsed`: the confirmation came after the lease had run out; the lease is not held and must be gained again. `late`: a
        lease that was not held was written, but so long ago that it has run out already.
        """
        had = self.expires is not None
        if self.lapsed(now):
            return "lapsed"
        if now >= sent_at + self.ttl_s:
            return "late"
        self.expires = max(self.expires or 0.0, sent_at + self.ttl_s)
        self._confirmed = max(self._confirmed, sent_at)
        self._retry_at = 0.0
        self._hurried = False
        return "renewed" if had else "gained"

    def lapsed(self, now: float) -> bool:
        """Return True once after the lease has run out."""
        if self.expires is None or now < self.expires:
            return False
        self.expires = None
        self._retry_at = 0.0
        return True

    def lost(self) -> bool:
        """Record that the lease was lost to another holder or deleted. Returns True if it was held until now."""
        had, self.expires = self.expires is not None, None
        self._retry_at = 0.0
        return had

    def failed(self, now: float) -> None:
        """Record a failed write, so that it is retried soon."""
        self._retry_at = now + self.pace_s / RETRIES_PER_TTL

    def hurry(self) -> None:
        """Make the next write due now, because the server may have been restarted and have forgotten the lease."""
        self._hurried = True
        self._retry_at = 0.0

    def next_action(self) -> float:
        if self.expires is None or self._hurried:
            return self._retry_at
        due = self._confirmed + self.pace_s / RENEWALS_PER_TTL
        return max(due, self._retry_at)


class LeaseKeeper:
    """Holds one key of a bucket as a lease. The value must be unique to this holder (it carries the holder's epoch)."""

    def __init__(
        self,
        messaging: Messaging,
        bucket_name: str,
        key: str,
        value: bytes,
        *,
        ttl_s: float = 4.0,
        on_change: Callable[[bool], None],
        contested: bool = False,
    ) -> None:
        """Call `on_change(True)` when the lease was gained and `on_change(False)` when it lapsed; not for renewals.

        `contested`: other processes want the same key. It is then not gained while the bucket is young.
        """
        self.bucket_name = bucket_name
        self.key = key
        self._messaging = messaging
        self._bucket: Bucket = messaging.bucket(bucket_name)
        self._contested = contested
        self._value = value
        self._ours = {value}  # values that may have been written without a confirmation
        self._clock = LeaseClock(ttl_s)
        self._call_limit_s = self._clock.pace_s / CALLS_PER_TTL
        self._loop = asyncio.get_running_loop()
        self._on_change = on_change
        self._revision = 0
        self._write = asyncio.Lock()
        self._released = False
        self._gained = asyncio.Event()
        self._wake = asyncio.Event()

    @property
    def held(self) -> bool:
        expires = self._clock.expires  # not by way of `LeaseClock.held`: this is asked for at every frame
        return expires is not None and self._loop.time() < expires

    @property
    def held_until_s(self) -> float:
        """Loop time until which the lease is held without another renewal; 0 when it is not held."""
        return self._clock.expires or 0.0

    async def wait_held(self, timeout_s: float) -> None:
        """Wait until the lease is held. Raises LeaseLost if it was not gained in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.held:
                    self._gained.clear()
                    await self._gained.wait()
        except TimeoutError:
            raise LeaseLost(f"the lease {self.key} was not gained in {timeout_s} s") from None

    async def run(self) -> None:
        """Gain and keep the lease until cancelled or released. A lapse is reported once, then the lease is gained again."""
        forget = self._messaging.on_reconnect(self._on_reconnect)
        try:
            await self._keep()
        finally:
            forget()

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._released:
            alarm = loop.call_at(self._clock.expires, self._check_lapse) if self._clock.expires is not None else None
            try:
                await self._sleep_until(self._clock.next_action())
                if not self._released:
                    await self._step()
            finally:
                if alarm is not None:
                    alarm.cancel()

    async def update(self, value: bytes) -> None:
        """Change the value.

        Raises LeaseLost if the lease is not held or is lost by the write, and JetStreamError if the outcome is unknown, in
        which case the next renewal writes the new value.
        """
        async with self._write:
            if not self.held:
                raise LeaseLost(f"the lease {self.key} is not held")
            self._set_value(value)
            await self._renew(raising=True)
        self._wake.set()

    async def release(self) -> None:
        """Give the lease up and delete the key, if it is still held. No lapse is reported."""
        self._released = True
        self._wake.set()
        async with self._write:
            held = self._clock.lost()
            if held:
                try:
                    await self._bucket.delete(self.key, revision=self._revision)
                except JetStreamError as error:
                    log.info("lease.release_failed", key=self.key, error=str(error))

    async def _on_reconnect(self) -> None:
        """Write the lease at once, in case the server has forgotten it."""
        self._clock.hurry()
        self._wake.set()

    # Steps:

    async def _sleep_until(self, when: float) -> None:
        loop = asyncio.get_running_loop()
        if when > loop.time():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(when):
                    await self._wake.wait()
        self._wake.clear()

    async def _step(self) -> None:
        loop = asyncio.get_running_loop()
        self._check_lapse()
        async with self._write:
            if self._released or loop.time() < self._clock.next_action():
                return  # an update has done it meanwhile, or an alarm has changed what is due
            try:
                if self._clock.expires is None:
                    await self._gain()
                else:
                    await self._renew(raising=False)
            except JetStreamError as error:
                log.info("lease.write_failed", key=self.key, error=str(error) or type(error).__name__)
                self._clock.failed(loop.time())

    async def _in_time(self, call: Awaitable[T]) -> T:
        """Await `call` with its own time limit.

        A limit for all calls of a step together would send the keeper back to the first call forever if the server is slow. So
        would a fixed one that is shorter than the way there and back: it is twice what the last call took, or what it had.
        """
        limit_s, asked_at = self._call_limit_s, self._loop.time()
        most_s = self._clock.pace_s / SLOW_CALLS_PER_TTL
        try:
            async with asyncio.timeout(limit_s):
                answer = await call
        except TimeoutError:
            self._call_limit_s = min(2.0 * limit_s, most_s)
            raise RequestTimeout(f"no answer about {self.key} in {limit_s:g} s") from None
        took_s = self._loop.time() - asked_at
        self._call_limit_s = min(max(2.0 * took_s, self._clock.pace_s / CALLS_PER_TTL), most_s)
        return answer

    async def _gain(self) -> None:
        loop = asyncio.get_running_loop()
        if self._contested and await self._young():
            self._clock.failed(loop.time())
            return
        sent_at = loop.time()
        try:
            revision = await self._in_time(self._bucket.create(self.key, self._value, ttl_s=self._clock.ttl_s))
        except RevisionConflict:
            entry = await self._in_time(self._bucket.get(self.key))
            if entry is None or entry.value not in self._ours:
                self._clock.failed(loop.time())
                return  # another process holds it; try again later
            sent_at = loop.time()
            revision = await self._in_time(self._write_over(entry.revision))
        if self._contested and await self._young():  # the server was restarted meanwhile: another process may hold it still
            self._clock.failed(loop.time())
            await self._in_time(self._bucket.delete(self.key, revision=revision))
            return
        self._confirm(revision, sent_at)

    async def _young(self) -> bool:
        """Return True while the bucket may have forgotten a lease that another process still believes in."""
        return await self._in_time(self._bucket.age_s()) < self._clock.ttl_s

    async def _renew(self, *, raising: bool) -> None:
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        try:
            revision = await self._in_time(self._write_over(self._revision))
        except RevisionConflict:
            entry = await self._in_time(self._bucket.get(self.key))
            sent_at = loop.time()
            if entry is not None and entry.value in self._ours:
                # An earlier write of this holder, whose outcome was unknown, has arrived after all.
                revision = await self._in_time(self._write_over(entry.revision))
            elif entry is not None or (again := await self._write_again()) is None:
                self._lose("expired" if entry is None else "taken")
                if raising:
                    raise LeaseLost(f"the lease {self.key} is lost") from None
                return
            else:
                revision = again
        self._confirm(revision, sent_at)
        if raising and not self.held:
            raise LeaseLost(f"the lease {self.key} ran out while it was changed")

    async def _write_again(self) -> int | None:
        """Write a lease of which the bucket has no record and return its revision; None if it was taken away or ran out."""
        if not self.held:
            return None
        try:
            write = self._bucket.create(self.key, self._value, ttl_s=self._clock.ttl_s, unmarked=True)
            revision = await self._in_time(write)
        except RevisionConflict:
            return None
        log.info("lease.written_again", key=self.key, revision=revision)
        return revision

    async def _write_over(self, revision: int) -> int:
        return await self._bucket.update(self.key, self._value, revision=revision, ttl_s=self._clock.ttl_s)

    def _confirm(self, revision: int, sent_at: float) -> None:
        self._revision = revision
        self._ours = {self._value}
        outcome = self._clock.confirmed(sent_at, asyncio.get_running_loop().time())
        if outcome == "lapsed":
            self._lapse("late")
        elif outcome == "gained":
            log.info("lease.gained", key=self.key, revision=revision)
            self._gained.set()
            self._on_change(True)

    def _set_value(self, value: bytes) -> None:
        self._value = value
        self._ours.add(value)

    def _check_lapse(self) -> None:
        if self._clock.lapsed(asyncio.get_running_loop().time()):
            self._lapse("not renewed in time")
            self._wake.set()

    def _lose(self, why: str) -> None:
        if self._clock.lost():
            self._lapse(why)

    def _lapse(self, why: str) -> None:
        metrics.LEASE_LAPSES.inc()
        log.warning("lease.lapsed", key=self.key, reason=why)
        self._on_change(False)


async def lease_gone(bucket: Bucket, key: str, *, ttl_s: float, hold_down: bool = False) -> bool:
    """Return True if the lease is absent now, by a fresh read.

    In the hold-down only one that was deleted counts: its holder has released it, or its process is known to be gone.
    False while a bucket that has no record of the key is younger than a lease's TTL: its holder may be about to write it again.
    """
    state = await bucket.state(key)
    if state == "present" or (hold_down and state != "deleted"):
        return False
    return state != "unknown" or await bucket.age_s() >= ttl_s
