"""`headrace.jetstream.ports.Bucket` and its watches over the simulated server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from headrace.jetstream.errors import (
    RequestTimeout,
)
from headrace.jetstream.ports import Change, Entry, KeyState
from tests.simulation.virtual.buckets import SimStore, Watcher

if TYPE_CHECKING:
    from tests.simulation.virtual.messaging import SimMessaging

T = TypeVar("T")


def whole(ttl_s: float | None) -> int | None:
    """TTLs are whole seconds, at least one, never shorter than asked for."""
    return None if ttl_s is None else max(1, math.ceil(ttl_s))


class SimBucket:
    """A key-value bucket seen from a process."""

    def __init__(self, messaging: SimMessaging, name: str) -> None:
        self._messaging = messaging
        self._lane = f"KV {name}"
        self.name = name

    @property
    def store(self) -> SimStore:
        return self._messaging.server.buckets[self.name]

    async def get(self, key: str) -> Entry | None:
        return await self._messaging.ask(self._lane, f"get {key}", lambda: self.store.get(key))

    async def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        return await self._write(f"put {key}", lambda: self.store.put(key, bytes(value), whole(ttl_s)))

    async def state(self, key: str) -> KeyState:
        return await self._messaging.ask(self._lane, f"state of {key}", lambda: self.store.state(key))

    async def age_s(self) -> float:
        return await self._messaging.ask(self._lane, f"age of {self.name}", self.store.age_s)

    async def create(self, key: str, value: bytes, *, ttl_s: float | None = None, unmarked: bool = False) -> int:
        return await self._write(f"create {key}", lambda: self.store.create(key, bytes(value), whole(ttl_s), unmarked=unmarked))

    async def update(self, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
        return await self._write(f"update {key}", lambda: self.store.update(key, bytes(value), revision, whole(ttl_s)))

    async def delete(self, key: str, *, revision: int | None = None) -> None:
        await self._write(f"delete {key}", lambda: self.store.delete(key, revision))

    async def entries(self, pattern: str = ">") -> list[Entry]:
        return await self._messaging.ask(self._lane, f"entries {pattern}", lambda: self.store.entries(pattern))

    def watch(self, on_change: Callable[[Change], None], pattern: str = ">") -> SimWatch:
        return SimWatch(self._messaging, self, on_change, pattern)

    async def _write(self, what: str, function: Callable[[], T]) -> T:
        done: list[T] = []

        def once() -> T:  # each write has an id of its own
            if not done:
                done.append(function())
            return done[0]

        return await self._messaging.write(
            self._lane, what, once, timeout_s=self._messaging.network.config.timeout_s, repeat=True
        )


class SimWatch:
    """Lists, follows, and lists again after every reconnect."""

    def __init__(self, messaging: SimMessaging, bucket: SimBucket, on_change: Callable[[Change], None], pattern: str) -> None:
        self._messaging = messaging
        self._bucket = bucket
        self._on_change = on_change
        self._pattern = pattern
        self._ready = asyncio.Event()
        self._seen: dict[str, int] = {}
        self._watcher: Watcher | None = None

    async def run(self) -> None:
        conn = self._messaging.conn
        conn.on_up.append(self._start)
        try:
            if conn.client_up:
                self._start()
            await self._messaging.loop.create_future()
        finally:
            conn.on_up.remove(self._start)
            if self._watcher is not None:
                self._messaging.network.up(
                    conn, self._bucket._lane, "unwatch", self._bucket.store.unwatch, self._watcher, sure=True
                )

    async def ready(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            raise RequestTimeout(f"watch of {self._bucket.name}: no listing within {timeout_s} s") from None

    def _start(self) -> None:
        conn = self._messaging.conn
        watcher = self._watcher = Watcher(conn, conn.epoch, self._pattern, lambda change: self._changed(watcher, change))
        self._messaging.network.up(
            conn,
            self._bucket._lane,
            f"watch {self._pattern}",
            lambda: self._bucket.store.watch(watcher, lambda listed: self._listed(watcher, listed)),
            sure=True,
        )

    def _listed(self, watcher: Watcher, listed: list[Entry]) -> None:
        if watcher is not self._watcher:
            return
        present = {entry.key for entry in listed}
        for key in [key for key in self._seen if key not in present]:
            revision = self._seen.pop(key)
            self._on_change(Change(key, None, revision, "missing"))
        for entry in listed:
            if self._seen.get(entry.key) != entry.revision:
                self._seen[entry.key] = entry.revision
                self._on_change(Change(entry.key, entry.value, entry.revision))
        self._ready.set()

    def _changed(self, watcher: Watcher, change: Change) -> None:
        if watcher is not self._watcher:
            return
        if change.value is None:
            self._seen.pop(change.key, None)
        else:
            self._seen[change.key] = change.revision
        self._on_change(change)
