"""Key-value buckets of the simulated server: compare-and-set, TTL on the server's clock, markers, watches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headrace.jetstream.errors import RevisionConflict
from headrace.jetstream.ports import Change, Entry, KeyState
from tests.simulation.virtual.network import Conn, matches

if TYPE_CHECKING:
    from tests.simulation.virtual.server import SimServer

EXPIRED_MARKER_S = 10.0  # how long markers stay
DELETE_MARKER_S = 30.0


@dataclass(slots=True)
class Item:
    """The last word on a key. `value` None: a marker."""

    value: bytes | None
    revision: int
    kind: Literal["put", "delete", "expired"] = "put"  # never `missing`: that is a watch's finding
    expires_s: float | None = None


@dataclass(eq=False, slots=True)
class Watcher:
    conn: Conn
    epoch: int
    pattern: str
    on_change: Callable[[Change], None]


class SimStore:
    """One bucket, history 1."""

    def __init__(self, server: SimServer, name: str, *, in_memory: bool = False) -> None:
        self.server = server
        self.name = name
        self.in_memory = in_memory
        self.made_s = float("-inf") if not in_memory else server.world.now
        self.items: dict[str, Item] = {}
        self.revision = 0
        self._forgotten: dict[str, float] = {}  # by a restart: until when these keys would have been there
        self._watchers: list[Watcher] = []

    def get(self, key: str) -> Entry | None:
        item = self.items.get(key)
        return None if item is None or item.value is None else Entry(key, item.value, item.revision)

    def entries(self, pattern: str) -> list[Entry]:
        return [entry for key in list(self.items) if matches(pattern, key) and (entry := self.get(key)) is not None]

    def put(self, key: str, value: bytes, ttl_s: float | None) -> int:
        return self._write(key, value, "put", ttl_s)

    def state(self, key: str) -> KeyState:
        item = self.items.get(key)
        if item is None:
            return "unknown"
        if item.kind == "put":
            return "present"
        return "deleted" if item.kind == "delete" else "expired"

    def leased(self, key: str) -> bool:
        """Return whether the key is there, or would be if no restart had forgotten it: its holder may count on that."""
        return self.get(key) is not None or (key not in self.items and self._forgotten.get(key, 0.0) > self.server.world.now)

    def age_s(self) -> float:
        return self.server.world.now - self.made_s

    def create(self, key: str, value: bytes, ttl_s: float | None, *, unmarked: bool = False) -> int:
        if self.get(key) is not None or (unmarked and key in self.items):
            raise RevisionConflict(f"{self.name}: {key} exists")
        return self._write(key, value, "put", ttl_s)

    def update(self, key: str, value: bytes, revision: int, ttl_s: float | None) -> int:
        self._compare(key, revision)
        return self._write(key, value, "put", ttl_s)

    def delete(self, key: str, revision: int | None) -> None:
        if revision is not None:
            self._compare(key, revision)
        self._write(key, None, "delete", None)

    def watch(self, watcher: Watcher, on_listed: Callable[[list[Entry]], None]) -> None:
        """List, then report."""
        listed = self.entries(watcher.pattern)
        self.server.world.network.down(watcher.conn, self._lane, "", on_listed, listed, sure=True)
        self._watchers.append(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    def drop(self, conn: Conn) -> None:
        self._watchers = [w for w in self._watchers if w.conn is not conn]

    def recover(self) -> None:
        """After a restart: what was in memory is forgotten, and what expired meanwhile is noticed now."""
        now = self.server.world.now
        if self.in_memory:
            self._forgotten |= {key: item.expires_s or 0.0 for key, item in self.items.items() if item.value is not None}
            self.items.clear()
            self.revision, self.made_s = 0, now
        for key, item in list(self.items.items()):
            if item.value is not None and item.expires_s is not None and item.expires_s <= now:
                self._expire(key, item)

    @property
    def _lane(self) -> str:
        return f"KV {self.name}"

    def _compare(self, key: str, revision: int) -> None:
        item = self.items.get(key)
        last = item.revision if item is not None else 0
        if last != revision:
            raise RevisionConflict(f"{self.name}: {key} is at revision {last}, not {revision}")

    def _write(self, key: str, value: bytes | None, kind: Literal["put", "delete", "expired"], ttl_s: float | None) -> int:
        world = self.server.world
        self.revision += 1
        item = self.items[key] = Item(value, self.revision, kind)
        if ttl_s is not None:
            item.expires_s = world.now + ttl_s
            world.at(ttl_s + self.server.late_s(), self._expire, key, item)
        if kind == "delete":
            world.at(DELETE_MARKER_S, self._sweep, key, item)
        elif kind == "expired":
            world.at(EXPIRED_MARKER_S, self._sweep, key, item)
        change = Change(key, value, self.revision, kind)
        lags = self.server.config.watch_lags_s
        for watcher in self._watchers:
            if matches(watcher.pattern, key):
                lag = lags[int(world.rng.random() * len(lags))]
                what = f"watch {key} {kind}"
                world.network.down(watcher.conn, self._lane, what, watcher.on_change, change, sure=True, lag_s=lag)
        return self.revision

    def _expire(self, key: str, item: Item) -> None:
        if self.server.up and self.items.get(key) is item:
            self._write(key, None, "expired", None)

    def _sweep(self, key: str, marker: Item) -> None:
        if self.items.get(key) is marker:
            del self.items[key]
