"""A stream of the simulated server: what it holds, refuses and removes, and its consumers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from headrace.jetstream.errors import QueueFull, RevisionConflict, TopologyError
from headrace.jetstream.ports import ConsumerSpec, PubAck, StoredMessage, StreamState, Unacked
from headrace.jetstream.specs import StreamSpec
from tests.simulation.virtual.consumers import SimConsumer
from tests.simulation.virtual.loop import EPOCH_S
from tests.simulation.virtual.network import headers_of, matches

if TYPE_CHECKING:
    from tests.simulation.virtual.server import SimServer


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

    def unacked(self, name: str) -> Unacked:
        if (consumer := self.consumers.get(name)) is None:
            raise TopologyError(f"there is no consumer {name}")
        floor = min(consumer.pending, default=consumer.last_delivered + 1) - 1
        return Unacked(floor, consumer.last_delivered, len(consumer.pending))

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
