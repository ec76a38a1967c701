"""A nats-server with JetStream, in memory and on virtual time.

Only what Headrace uses, but that as the real server does it: `test_server_semantics.py` runs the same scenarios against both.
Everything here happens inside the server, at one instant; `network.py` brings calls in and answers out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.jetstream.errors import QueueFull, RevisionConflict, TopologyError
from headrace.jetstream.ports import Message, PubAck, StreamState
from headrace.jetstream.specs import StreamSpec
from headrace.jetstream.topology import Topology
from tests.simulation.virtual.buckets import SimStore
from tests.simulation.virtual.consumers import SimConsumer
from tests.simulation.virtual.network import CORE, Conn, SimConfig, Sub, matches
from tests.simulation.virtual.objects import SimObject
from tests.simulation.virtual.streams import SimStream

if TYPE_CHECKING:
    from tests.simulation.virtual.world import World


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
