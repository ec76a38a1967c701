"""A durable pull consumer of the simulated server: what waits for an ack, and when it comes again."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.jetstream.ports import ConsumerSpec, StoredMessage
from tests.simulation.virtual.network import Conn, matches

if TYPE_CHECKING:
    from tests.simulation.virtual.streams import SimStream


@dataclass(slots=True)
class Pull:
    """A waiting pull request."""

    conn: Conn
    left: int
    priority: int
    on_message: Callable[[int, StoredMessage, int, int], None]  # request still wants, message, times delivered, pending
    on_end: Callable[[], None]
    session: int = -1  # of the connection, as the server counts
    open: bool = True


@dataclass(slots=True)
class Pending:
    """A message that is out with a client."""

    due: float
    timer: bool = False
    queued: bool = False  # waits in the redelivery queue


class SimConsumer:
    """A durable pull consumer."""

    def __init__(self, stream: SimStream, spec: ConsumerSpec) -> None:
        self.stream = stream
        self.spec = spec
        self.waiting: list[Pull] = []
        self.pending: dict[int, Pending] = {}
        self.redeliver: deque[int] = deque()
        self.delivered: dict[int, int] = {}  # how often, per sequence
        self.last_delivered = 0
        self.active_s = stream.server.world.now
        self.alive = True
        self.fresh = OrderedDict.fromkeys(seq for seq, message in stream.messages.items() if self.wants(message.subject))

    def wants(self, subject: str) -> bool:
        return any(matches(f, subject) for f in self.spec.filter_subjects)

    @property
    def num_pending(self) -> int:
        return len(self.fresh)

    def pull(self, pull: Pull, expires_s: float) -> None:
        pull.session = pull.conn.session
        self._prune()
        if len(self.waiting) >= self.spec.max_waiting:
            self._end(pull)
            return
        self.waiting.append(pull)
        self.stream.server.world.at(expires_s, self._expire, pull)
        self.active_s = self.stream.server.world.now
        self.dispatch()

    def withdraw(self, pull: Pull) -> None:
        pull.open = False
        self._prune()

    def dispatch(self) -> None:
        """Hand out what can be handed out: redeliveries before new messages, to the lowest priority number, in turn."""
        if not self.alive or not self.stream.server.up:
            return
        self._prune()
        while self.waiting and (seq := self._next()) is not None:
            pull = min(self.waiting, key=lambda p: p.priority) if self.spec.prioritized else self.waiting[0]
            self.waiting.remove(pull)
            pull.left -= 1
            if pull.left > 0:
                self.waiting.append(pull)
            else:
                pull.open = False
            self._deliver(seq, pull)

    def _deliver(self, seq: int, pull: Pull) -> None:
        world = self.stream.server.world
        message = self.stream.messages[seq]
        self.delivered[seq] = self.delivered.get(seq, 0) + 1
        self.last_delivered = max(self.last_delivered, seq)
        entry = self.pending.setdefault(seq, Pending(0.0))
        entry.due = world.now + self.spec.ack_wait_s
        entry.queued = False
        self._arm(seq, entry)
        pending = self.num_pending
        what = f"delivery {message.subject} #{seq} x{self.delivered[seq]}"
        times = self.delivered[seq]
        world.network.down(pull.conn, self.stream.spec.name, what, pull.on_message, pull.left, message, times, pending)

    def _next(self) -> int | None:
        messages, limit = self.stream.messages, self.spec.max_deliver
        while self.redeliver:
            seq = self.redeliver.popleft()
            if seq in self.pending and seq in messages and (limit < 0 or self.delivered.get(seq, 0) < limit):
                return seq
            self.pending.pop(seq, None)
        if len(self.pending) >= self.spec.max_ack_pending > 0:
            return None
        return self.fresh.popitem(last=False)[0] if self.fresh else None

    def _arm(self, seq: int, entry: Pending) -> None:
        if not entry.timer:
            entry.timer = True
            world = self.stream.server.world
            world.at(max(0.0, entry.due - world.now), self._due, seq, entry)

    def _due(self, seq: int, entry: Pending) -> None:
        entry.timer = False
        server = self.stream.server
        if not self.alive or self.pending.get(seq) is not entry or entry.queued or not server.up:
            return
        if entry.due > server.world.now + 1e-9:
            self._arm(seq, entry)
        else:
            self._queue(seq, entry)

    def _queue(self, seq: int, entry: Pending) -> None:
        entry.queued = True
        self.redeliver.append(seq)
        self.dispatch()

    def ack(self, seq: int) -> None:
        """Any ack that names a delivered sequence counts, whoever holds the message by now."""
        if seq > self.last_delivered or not self.alive:
            return
        self.forget(seq)
        if self.stream.spec.retention == "workqueue":
            self.stream.remove(seq)
        self.dispatch()

    def progress(self, seq: int) -> None:
        if (entry := self.pending.get(seq)) is not None:
            entry.due = self.stream.server.world.now + self.spec.ack_wait_s

    def nak(self, seq: int, delay_s: float) -> None:
        entry = self.pending.get(seq)
        if entry is None or entry.queued:
            return
        if delay_s > 0:
            fresh = self.pending[seq] = Pending(self.stream.server.world.now + delay_s)
            self._arm(seq, fresh)
        else:
            self._queue(seq, entry)

    def forget(self, seq: int) -> None:
        self.fresh.pop(seq, None)
        self.pending.pop(seq, None)
        self.delivered.pop(seq, None)

    def recover(self) -> None:
        """After a restart of the server: pulls are gone, what was out comes back when its time is over."""
        self.waiting.clear()
        self.active_s = self.stream.server.world.now
        for seq, entry in self.pending.items():
            if not entry.queued:
                self._arm(seq, entry)
        self._watch_activity()

    def _prune(self) -> None:
        self.waiting = [p for p in self.waiting if p.open and p.conn.server_up and p.conn.session == p.session]

    def _expire(self, pull: Pull) -> None:
        if pull.open and pull in self.waiting:
            self.waiting.remove(pull)
            self._end(pull)

    def _end(self, pull: Pull) -> None:
        pull.open = False
        self.stream.server.world.network.down(pull.conn, self.stream.spec.name, "", pull.on_end)
        self._watch_activity()

    def _watch_activity(self) -> None:
        if self.spec.inactive_threshold_s is not None:
            self.stream.server.world.at(self.spec.inactive_threshold_s, self._maybe_remove)

    def _maybe_remove(self) -> None:
        world, threshold = self.stream.server.world, self.spec.inactive_threshold_s
        self._prune()
        out = any(entry.due > world.now for entry in self.pending.values())
        if self.alive and threshold is not None and not self.waiting and not out and world.now - self.active_s >= threshold:
            self.stream.delete_consumer(self.spec.name)
