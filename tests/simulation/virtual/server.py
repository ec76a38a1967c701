"""A nats-server with JetStream, in memory and on virtual time.

Only what Headrace uses, but that as the real server does it: `test_server_semantics.py` runs the same scenarios against both.
Everything here happens inside the server, at one instant; `network.py` brings calls in and answers out.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from headrace.jetstream.errors import QueueFull, RevisionConflict, TopologyError
from headrace.jetstream.ports import ConsumerSpec, Message, PubAck, StoredMessage, StreamState
from headrace.jetstream.specs import StreamSpec
from headrace.jetstream.topology import Topology
from tests.simulation.virtual.buckets import SimStore
from tests.simulation.virtual.loop import EPOCH_S
from tests.simulation.virtual.network import CORE, Conn, SimConfig, Sub, headers_of, matches
from tests.simulation.virtual.objects import SimObject

if TYPE_CHECKING:
    from tests.simulation.virtual.world import World


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


class SimStream:
    """A stream: work queue or limits."""

    def __init__(self, server: SimServer, spec: StreamSpec) -> None:
        self.server = server
        self.spec = spec
        self.messages: dict[int, StoredMessage] = {}
        self.subjects: dict[str, dict[int, None]] = {}
        self.consumers: dict[str, SimConsumer] = {}
        self.ids: dict[str, tuple[int, float]] = {}
        self.tails: list[Callable[[], None]] = []  # of those who follow the stream
        self.last_seq = 0
        self.bytes = 0

    def store(self, subject: str, data: bytes, headers: Mapping[str, str] | None, options: Mapping[str, object]) -> PubAck:
        """`options`: msg_id, ttl_s, expect_last_subject_seq. Raises QueueFull, RevisionConflict."""
        now = self.server.world.now
        msg_id, ttl_s = options.get("msg_id"), options.get("ttl_s")
        seen = self.ids.get(msg_id) if isinstance(msg_id, str) and self.server.config.dedupe else None
        if seen and now - seen[1] < self.spec.duplicate_window_s:
            return PubAck(self.spec.name, seen[0], duplicate=True)
        expected = options.get("expect_last_subject_seq")
        if expected is not None and expected != next(reversed(self.subjects.get(subject, {0: None})), 0):
            raise RevisionConflict(f"{subject}: the last message is not #{expected}")
        self._make_room(subject, len(data))
        self.last_seq += 1
        seq = self.last_seq
        if isinstance(msg_id, str):
            self.ids[msg_id] = (seq, now)
        self.messages[seq] = StoredMessage(subject, seq, data, headers_of(headers) or None, EPOCH_S + now)
        self.subjects.setdefault(subject, {})[seq] = None
        self.bytes += len(data)
        lifetimes = [float(t) for t in (ttl_s, self.spec.max_age_s) if isinstance(t, int | float) and t > 0]
        if lifetimes:
            self.server.world.at(min(lifetimes) + self.server.late_s(), self.remove, seq)
        for consumer in list(self.consumers.values()):
            if consumer.wants(subject):
                consumer.fresh[seq] = None
                consumer.dispatch()
        for tail in list(self.tails):
            tail()
        return PubAck(self.spec.name, seq)

    def _make_room(self, subject: str, size: int) -> None:
        spec = self.spec
        own = self.subjects.get(subject, {})
        if 0 < spec.max_msgs_per_subject <= len(own):
            if spec.discard == "new" and spec.discard_new_per_subject:
                raise QueueFull("maximum messages per subject exceeded", subject=subject, scope="subject")
            self.remove(next(iter(own)))
        while 0 < spec.max_msgs <= len(self.messages) or 0 < spec.max_bytes < self.bytes + size:
            scope = "stream" if 0 < spec.max_msgs <= len(self.messages) else "bytes"
            if spec.discard == "new":
                raise QueueFull(
                    f"maximum {'messages' if scope == 'stream' else 'bytes'} exceeded", subject=subject, scope=scope
                )
            self.remove(next(iter(self.messages)))

    def remove(self, seq: int) -> bool:
        message = self.messages.pop(seq, None)
        if message is None:
            return False
        self.bytes -= len(message.data)
        own = self.subjects[message.subject]
        del own[seq]
        if not own:
            del self.subjects[message.subject]
        for consumer in self.consumers.values():
            consumer.forget(seq)
        return True

    def counts(self, pattern: str) -> dict[str, int]:
        return {subject: len(seqs) for subject, seqs in self.subjects.items() if matches(pattern, subject)}

    def of_subject(self, subject: str, limit: int, start_seq: int = 1) -> list[StoredMessage]:
        if "*" in subject or ">" in subject:
            return self.after(subject, start_seq - 1, limit)
        return [self.messages[seq] for seq in self.subjects.get(subject, ()) if seq >= start_seq][:limit]

    def last_of(self, subjects: Sequence[str]) -> list[StoredMessage]:
        """The last message of each of these subjects that has one."""
        return [self.messages[next(reversed(self.subjects[subject]))] for subject in subjects if subject in self.subjects]

    def state(self, subject: str) -> StreamState:
        own = [seq for seq, message in self.messages.items() if subject and matches(subject, message.subject)]
        first = next(iter(self.messages), self.last_seq + 1)
        return StreamState(first, self.last_seq, len(self.messages), "simulated", own[-1] if own else 0)

    def purge(self, subject: str, up_to_seq: int) -> int:
        gone = [
            seq
            for seq, message in self.messages.items()
            if (not subject or matches(subject, message.subject)) and (not up_to_seq or seq <= up_to_seq)
        ]
        return sum(self.remove(seq) for seq in gone)

    def after(self, subject: str, seq: int, limit: int) -> list[StoredMessage]:
        wanted = (m for number, m in self.messages.items() if number > seq and matches(subject, m.subject))
        return list(islice(wanted, limit))

    def ensure_consumer(self, spec: ConsumerSpec) -> None:
        existing = self.consumers.get(spec.name)
        if existing is not None:
            if existing.spec.prioritized != spec.prioritized or existing.spec.mem_storage != spec.mem_storage:
                raise TopologyError(f"consumer {spec.name}: its policy and storage cannot be changed")
            existing.spec = spec
            return
        if self.spec.retention == "workqueue":
            for other in self.consumers.values():
                if any(_overlap(a, b) for a in spec.filter_subjects for b in other.spec.filter_subjects):
                    raise TopologyError(f"consumer {spec.name}: {other.spec.name} reads some of its subjects already")
        self.consumers[spec.name] = SimConsumer(self, spec)
        self.consumers[spec.name].recover()

    def delete_consumer(self, name: str) -> None:
        consumer = self.consumers.pop(name, None)
        if consumer is not None:
            consumer.alive = False
            for pull in consumer.waiting:
                consumer._end(pull)

    def restart(self) -> None:
        """What a restart of the server leaves of this stream."""
        if self.spec.storage == "memory":
            self.messages.clear()
            self.subjects.clear()
            self.consumers.clear()
            self.ids.clear()
            self.last_seq = self.bytes = 0
        self.ids = {i: seen for i, seen in self.ids.items() if seen[0] in self.messages}
        self.consumers = {name: c for name, c in self.consumers.items() if not c.spec.mem_storage}
        for consumer in self.consumers.values():
            consumer.recover()


def _overlap(a: str, b: str) -> bool:
    one, two = a.split("."), b.split(".")
    for x, y in zip(one, two, strict=False):
        if ">" in (x, y):
            return True
        if "*" not in (x, y) and x != y:
            return False
    return len(one) == len(two)


class SimServer:
    """Streams, buckets, objects and the core broker."""

    def __init__(self, world: World, config: SimConfig) -> None:
        self.world = world
        self.config = config
        self.up = True
        self.streams: dict[str, SimStream] = {}
        self.buckets: dict[str, SimStore] = {}
        self.objects: dict[str, dict[str, SimObject]] = {}
        self._subs: list[Sub] = []
        self._conns: dict[str, Conn] = {}

    # topology ----------------------------------------------------------------------------------------------------------------
    def install(self, topology: Topology) -> None:
        """Everything a deployment needs."""
        for spec in topology.streams():
            self.add_stream(spec)
        for bucket in topology.buckets():
            self.add_bucket(bucket.name, in_memory=bucket.storage == "memory")
        for store in topology.object_stores():
            self.add_objects(store.name)

    def add_stream(self, spec: StreamSpec) -> None:
        self.streams.setdefault(spec.name, SimStream(self, spec))

    def add_bucket(self, name: str, *, in_memory: bool = False) -> None:
        self.buckets.setdefault(name, SimStore(self, name, in_memory=in_memory))

    def add_objects(self, name: str) -> None:
        self.objects.setdefault(name, {})

    def state_of(self, stream: str, subject: str) -> StreamState:
        """The bounds of a stream, or of that of an object store, which has no cap here."""
        objects = self.objects.get(stream.removeprefix("OBJ_"))
        if objects is None:
            return self.stream(stream).state(subject)
        size = sum(len(held.data) for held in objects.values())
        return StreamState(1, len(objects), len(objects), "simulated", bytes=size)

    def stream(self, name: str) -> SimStream:
        if name not in self.streams:
            raise TopologyError(f"there is no stream {name}")
        return self.streams[name]

    def consumer(self, stream: str, name: str) -> SimConsumer | None:
        return self.streams[stream].consumers.get(name) if stream in self.streams else None

    # connections -------------------------------------------------------------------------------------------------------------
    def attach(self, conn: Conn) -> None:
        """A connection is made (again), with the subscriptions the client has."""
        self.detach(conn)
        conn.epoch += 1
        conn.link = conn.client_up = conn.server_up = True
        conn.since_s = self.world.now
        self._conns[conn.id] = conn
        self._subs.extend(conn.subs)

    def detach(self, conn: Conn) -> None:
        """The server has noticed that the connection is gone."""
        conn.server_up = False
        conn.session += 1
        self._conns.pop(conn.id, None)
        self._subs = [sub for sub in self._subs if sub.conn is not conn]
        for bucket in self.buckets.values():
            bucket.drop(conn)

    def subscribe(self, sub: Sub) -> None:
        if sub.conn.server_up and sub not in self._subs and sub in sub.conn.subs:
            self._subs.append(sub)

    def unsubscribe(self, sub: Sub) -> None:
        if sub in self._subs:
            self._subs.remove(sub)

    # core --------------------------------------------------------------------------------------------------------------------
    def route(self, sender: str, message: Message) -> int:
        """Give a core message to everybody who listens. Returns how many that are."""
        subject = message.subject
        if subject.startswith("_INBOX."):
            return self._to_inbox(message)
        found = [sub for sub in self._subs if matches(sub.pattern, subject)]
        groups: dict[tuple[str, str], list[Sub]] = {}
        receivers: list[Sub] = []
        for sub in found:
            if sub.queue:
                groups.setdefault((sub.pattern, sub.queue), []).append(sub)
            else:
                receivers.append(sub)
        receivers += [members[int(self.world.rng.random() * len(members))] for members in groups.values()]
        for sub in receivers:
            self.world.network.down(sub.conn, f"{CORE} {sender}", f"message {subject}", _hand, sub, message)
        return len(found)

    def _to_inbox(self, message: Message) -> int:
        conn = self._conns.get(message.subject.split(".")[1])
        if conn is None:
            return 0
        self.world.network.down(conn, CORE, f"reply {message.subject}", conn.machine.answer, conn, message)
        return 1

    def send(self, sender: str, message: Message) -> None:
        """A core publish; a stream that takes the subject stores it too."""
        self.route(sender, message)
        stream = self.stream_of(message.subject)
        if stream is not None:
            try:
                stream.store(message.subject, message.data, message.headers, {})
            except (QueueFull, RevisionConflict):
                return

    def publish(self, sender: str, message: Message, options: Mapping[str, object]) -> PubAck:
        """A publish that is answered. Raises TopologyError, QueueFull, RevisionConflict."""
        self.route(sender, Message(message.subject, message.data, "", message.headers))
        stream = self.stream_of(message.subject)
        if stream is None:
            raise TopologyError(f"no stream takes {message.subject}")
        if self._spuriously_full(message.subject):
            raise QueueFull("maximum messages per subject exceeded", subject=message.subject, scope="subject")
        return stream.store(message.subject, message.data, message.headers, options)

    def _spuriously_full(self, subject: str) -> bool:
        config = self.config
        return (
            config.full > 0
            and self.world.now < config.quiet_at_s
            and self.world.rng.random() < config.full
            and not config.never_full(subject)
        )

    def stream_of(self, subject: str) -> SimStream | None:
        for stream in self.streams.values():
            if any(matches(pattern, subject) for pattern in stream.spec.subjects):
                return stream
        return None

    # life --------------------------------------------------------------------------------------------------------------------
    def late_s(self) -> float:
        """How late an expiry happens."""
        return self.world.rng.random() * self.config.ttl_late_s

    def stop(self) -> None:
        """The server process dies. Files stay."""
        self.up = False

    def recover(self) -> None:
        self.up = True
        for stream in self.streams.values():
            stream.restart()
        for bucket in self.buckets.values():
            bucket.recover()


def _hand(sub: Sub, message: Message) -> None:
    if sub in sub.conn.subs:
        sub.on_message(message)
