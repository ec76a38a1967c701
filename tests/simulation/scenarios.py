"""What Headrace relies on in a NATS server, as short scenarios.

Each runs against the simulated server and against a real one (`test_server_semantics.py`).  A scenario has two connections
and a topology of its own, with caps of 2 messages per subject in REQ.  It must leave room for slow machines: times are checked
against bounds that only a wrong server would miss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from jetstream.errors import NoResponder, QueueFull, RequestTimeout, RevisionConflict, StreamTrimmed, TopologyError
from jetstream.ports import Change, ConsumerSpec, Delivery, Message, Messaging, PullLoop
from jetstream.subjects import Subjects
from jetstream.topology import Topology, request_consumer

ACK_WAIT_S = 0.8
POOL = "m-00000000"


@dataclass
class Bed:
    """Two connections to one server that holds `topology`."""

    a: Messaging
    b: Messaging
    subjects: Subjects
    group: asyncio.TaskGroup
    pulls: list[PullLoop] = field(default_factory=list)

    @property
    def work(self) -> str:
        return self.subjects.stream("WORK")

    def subject(self, worker: str = "w1") -> str:
        return self.subjects.work(POOL, worker)

    async def consumer(self, *, name: str = "C", worker: str = "w1", **options: object) -> str:
        await self.a.ensure_consumer(
            ConsumerSpec(
                stream=self.work,
                name=name,
                filter_subjects=(self.subject(worker),),
                **{"ack_wait_s": ACK_WAIT_S, **options},  # type: ignore[arg-type]
            )
        )
        return name

    def reader(self, messaging: Messaging, consumer: str = "C", *, credit: int = 10, priority: int | None = None) -> Readings:
        """Start pulling; everything that comes is kept."""
        readings = Readings()
        readings.loop = messaging.pull(self.work, consumer, readings.take, credit=credit, priority=priority)
        self.pulls.append(readings.loop)
        self.group.create_task(readings.loop.run())
        return readings


class Readings:
    """What one pull loop was given."""

    loop: PullLoop

    def __init__(self) -> None:
        self.got: list[Delivery] = []
        self._more = asyncio.Event()

    def take(self, delivery: Delivery) -> None:
        self.got.append(delivery)
        self._more.set()

    async def wait(self, n: int, timeout_s: float = 5.0) -> list[Delivery]:
        async with asyncio.timeout(timeout_s):
            while len(self.got) < n:
                self._more.clear()
                await self._more.wait()
        return self.got


def _note(seen: list[str], name: str, _message: Message) -> None:
    seen.append(name)


async def _until_gone(read: Callable[[], Awaitable[object]], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while await read() is not None:
            await asyncio.sleep(0.02)


def topology(subjects: Subjects) -> Topology:
    mib = 1024 * 1024
    return Topology(
        subjects=subjects, tenant_cap=2, request_bytes=mib, work_bytes=mib, batch_bytes=mib, kv_bytes=mib, worker_cap=100
    )


async def run(scenario: Callable[[Bed], Awaitable[None]], a: Messaging, b: Messaging, subjects: Subjects) -> None:
    async with asyncio.TaskGroup() as group:
        bed = Bed(a, b, subjects, group)
        await scenario(bed)
        for pull in bed.pulls:
            await pull.stop()


async def an_id_is_taken_once_in_a_whole_stream(bed: Bed) -> None:
    first = await bed.a.publish(bed.subject("w1"), b"1", msg_id="x")
    again = await bed.a.publish(bed.subject("w1"), b"1", msg_id="x")
    elsewhere = await bed.a.publish(bed.subject("w2"), b"1", msg_id="x")
    assert [first.duplicate, again.duplicate, elsewhere.duplicate] == [False, True, True]
    assert again.seq == elsewhere.seq == first.seq
    assert await bed.a.subject_counts(bed.work, bed.subjects.work_filter(POOL)) == {bed.subject("w1"): 1}


async def a_removed_message_keeps_its_id_taken(bed: Bed) -> None:
    ack = await bed.a.publish(bed.subject(), b"1", msg_id="x")
    assert await bed.a.delete_message(bed.work, ack.seq)
    assert (await bed.a.publish(bed.subject(), b"1", msg_id="x")).duplicate


async def a_full_subject_refuses_and_does_not_burn_the_id(bed: Bed) -> None:
    subject, other = bed.subjects.req(POOL, "std"), bed.subjects.req(POOL, "std", "t2")
    kept = [await bed.a.publish(subject, b"", msg_id=f"{i}") for i in range(2)]
    for _ in range(2):
        with pytest.raises(QueueFull) as caught:
            await bed.a.publish(subject, b"", msg_id="late")
        assert caught.value.scope == "subject"
    await bed.a.publish(other, b"", msg_id="other")
    await bed.a.delete_message(bed.subjects.stream("REQ"), kept[0].seq)
    assert not (await bed.a.publish(subject, b"", msg_id="late")).duplicate


async def a_delivered_message_still_fills_its_subject(bed: Bed) -> None:
    subject = bed.subjects.req(POOL, "std")
    spec = request_consumer(bed.subjects, POOL, "std")
    await bed.a.ensure_consumer(spec)
    readings = Readings()
    readings.loop = bed.a.pull(spec.stream, spec.name, readings.take, credit=10, priority=0)
    bed.pulls.append(readings.loop)
    bed.group.create_task(readings.loop.run())
    for _ in range(2):
        await bed.a.publish(subject, b"")
    got = await readings.wait(2)
    with pytest.raises(QueueFull):
        await bed.a.publish(subject, b"")
    got[0].ack()
    await _until_gone(lambda: bed.a.get_message(spec.stream, got[0].stream_seq))
    await bed.a.publish(subject, b"")


async def a_moved_request_is_never_refused(bed: Bed) -> None:
    for _ in range(5):
        await bed.a.publish(bed.subjects.req(POOL, "re"), b"")


async def what_is_not_acked_comes_again(bed: Bed) -> None:
    await bed.consumer()
    reader = bed.reader(bed.a)
    ack = await bed.a.publish(bed.subject(), b"x", headers={"Hr-Attempt": "3"})
    got = await reader.wait(3)
    assert [d.num_delivered for d in got] == [1, 2, 3]
    assert {(d.stream_seq, d.subject, d.data, d.headers["Hr-Attempt"]) for d in got} == {(ack.seq, bed.subject(), b"x", "3")}


async def a_stale_ack_removes_the_message(bed: Bed) -> None:
    await bed.consumer()
    first = bed.reader(bed.a, credit=1)
    ack = await bed.a.publish(bed.subject(), b"")
    [stale] = await first.wait(1)
    second = bed.reader(bed.b, credit=1)
    [fresh] = await second.wait(1)
    assert fresh.num_delivered == 2
    stale.ack()
    await _until_gone(lambda: bed.a.get_message(bed.work, ack.seq))
    second.loop.add_credit(5)
    await asyncio.sleep(2 * ACK_WAIT_S)
    assert len(second.got) == 1
    fresh.ack()  # names what is gone already


async def progress_holds_off_redelivery_and_its_end_does_not(bed: Bed) -> None:
    await bed.consumer()
    reader = bed.reader(bed.a)
    await bed.a.publish(bed.subject(), b"")
    [held] = await reader.wait(1)
    for _ in range(9):
        await asyncio.sleep(ACK_WAIT_S / 5)
        held.progress()
    assert len(reader.got) == 1
    await reader.wait(2)


async def stale_progress_holds_off_redelivery_too(bed: Bed) -> None:
    await bed.consumer()
    reader = bed.reader(bed.a)
    await bed.a.publish(bed.subject(), b"")
    stale = (await reader.wait(2))[0]
    for _ in range(9):
        await asyncio.sleep(ACK_WAIT_S / 5)
        stale.progress()
    assert len(reader.got) == 2


async def progress_of_what_has_expired_already_comes_too_late(bed: Bed) -> None:
    await bed.consumer()
    reader = bed.reader(bed.a, credit=1)
    await bed.a.publish(bed.subject(), b"")
    [held] = await reader.wait(1)
    await asyncio.sleep(2 * ACK_WAIT_S)  # nobody waits, so it lies ready
    held.progress()
    await asyncio.sleep(0.1)
    reader.loop.add_credit(1)
    await reader.wait(2, timeout_s=ACK_WAIT_S * 0.75)


async def a_nak_brings_it_back_at_once_or_when_it_says(bed: Bed) -> None:
    await bed.consumer(ack_wait_s=30.0)
    reader = bed.reader(bed.a)
    await bed.a.publish(bed.subject(), b"")
    [first] = await reader.wait(1)
    first.nak()
    second = (await reader.wait(2, timeout_s=2.0))[1]
    loop = asyncio.get_running_loop()
    before = loop.time()
    second.nak(0.5)
    await reader.wait(3, timeout_s=3.0)
    assert loop.time() - before > 0.45


async def a_terminated_message_is_gone(bed: Bed) -> None:
    await bed.consumer()
    reader = bed.reader(bed.a)
    ack = await bed.a.publish(bed.subject(), b"")
    (await reader.wait(1))[0].term("bad")
    await _until_gone(lambda: bed.a.get_message(bed.work, ack.seq))


async def the_lower_priority_number_is_served_first(bed: Bed) -> None:
    await bed.consumer(prioritized=True)
    late = bed.reader(bed.b, credit=10, priority=9)
    await asyncio.sleep(0.1)
    early = bed.reader(bed.a, credit=2, priority=0)
    await asyncio.sleep(0.1)
    for i in range(3):
        await bed.a.publish(bed.subject(), b"%d" % i)
    await early.wait(2)
    await late.wait(1)
    for delivery in early.got + late.got:
        delivery.ack()
    assert [d.data for d in early.got] == [b"0", b"1"]
    assert [d.data for d in late.got] == [b"2"]


async def equal_pulls_take_turns(bed: Bed) -> None:
    await bed.consumer()
    one = bed.reader(bed.a, credit=4)
    await asyncio.sleep(0.1)
    two = bed.reader(bed.b, credit=4)
    await asyncio.sleep(0.1)
    for i in range(4):
        await bed.a.publish(bed.subject(), b"%d" % i)
    await one.wait(2)
    await two.wait(2)
    for delivery in one.got + two.got:
        delivery.ack()
    assert [d.data for d in one.got] == [b"0", b"2"]
    assert [d.data for d in two.got] == [b"1", b"3"]


async def redelivery_comes_before_new_messages(bed: Bed) -> None:
    await bed.consumer()
    reader = bed.reader(bed.a, credit=1)
    await bed.a.publish(bed.subject(), b"old")
    await reader.wait(1)
    await bed.a.publish(bed.subject(), b"new")
    await asyncio.sleep(2 * ACK_WAIT_S)
    reader.loop.add_credit(2)
    got = await reader.wait(3)
    assert [d.data for d in got] == [b"old", b"old", b"new"]


async def max_ack_pending_holds_new_messages_back(bed: Bed) -> None:
    await bed.consumer(max_ack_pending=2, ack_wait_s=30.0)
    reader = bed.reader(bed.a)
    for _ in range(3):
        await bed.a.publish(bed.subject(), b"")
    await reader.wait(2)
    await asyncio.sleep(0.3)
    assert len(reader.got) == 2
    reader.got[0].ack()
    await reader.wait(3)


async def a_stopped_reader_gets_nothing_more(bed: Bed) -> None:
    await bed.consumer()
    one = bed.reader(bed.a)
    await asyncio.sleep(0.1)
    await one.loop.stop()
    two = bed.reader(bed.b)
    await bed.a.publish(bed.subject(), b"")
    (await two.wait(1, timeout_s=3.0))[0].ack()
    assert one.got == []


async def withdrawn_credit_is_not_used(bed: Bed) -> None:
    await bed.consumer()
    reader = bed.reader(bed.a, credit=3)
    await asyncio.sleep(0.1)
    reader.loop.add_credit(-3)
    await asyncio.sleep(0.1)
    await bed.a.publish(bed.subject(), b"")
    await asyncio.sleep(0.3)
    assert reader.got == []
    reader.loop.add_credit(1)
    (await reader.wait(1))[0].ack()


async def a_pull_loop_outlives_the_expiry_of_its_pulls(bed: Bed) -> None:
    await bed.consumer()
    readings = Readings()
    readings.loop = bed.a.pull(bed.work, "C", readings.take, credit=1, expires_s=1.0)
    bed.pulls.append(readings.loop)
    bed.group.create_task(readings.loop.run())
    await asyncio.sleep(2.5)
    await bed.a.publish(bed.subject(), b"")
    (await readings.wait(1, timeout_s=2.0))[0].ack()


async def a_deleted_message_is_neither_there_nor_redelivered(bed: Bed) -> None:
    await bed.consumer()
    reader = bed.reader(bed.a)
    ack = await bed.a.publish(bed.subject(), b"x")
    stored = await bed.a.get_message(bed.work, ack.seq)
    assert stored is not None
    assert (stored.subject, stored.seq, stored.data) == (bed.subject(), ack.seq, b"x")
    [held] = await reader.wait(1)
    assert await bed.b.delete_message(bed.work, ack.seq) is True
    assert await bed.b.delete_message(bed.work, ack.seq) is False
    assert await bed.a.get_message(bed.work, ack.seq) is None
    held.progress()
    held.ack()
    await asyncio.sleep(2 * ACK_WAIT_S)
    assert len(reader.got) == 1


async def messages_wait_for_a_consumer_and_survive_it(bed: Bed) -> None:
    for i in range(2):
        await bed.a.publish(bed.subject(), b"%d" % i)
    await bed.consumer(ack_wait_s=30.0)
    reader = bed.reader(bed.a)
    stale = (await reader.wait(2))[1]
    await reader.loop.stop()
    await bed.a.delete_consumer(bed.work, "C")
    await bed.a.delete_consumer(bed.work, "C")  # fine when absent
    await bed.consumer(ack_wait_s=30.0)
    second = bed.reader(bed.b, credit=1)
    got = await second.wait(1)
    assert (got[0].data, got[0].num_delivered) == (b"0", 1)
    stale.ack()  # of a sequence that this consumer has not delivered yet
    await asyncio.sleep(0.2)
    second.loop.add_credit(1)
    assert (await second.wait(2))[1].data == b"1"


async def a_reader_of_a_missing_consumer_has_it_made_and_goes_on(bed: Bed) -> None:
    readings = Readings()

    async def make() -> None:
        await bed.consumer()

    readings.loop = bed.a.pull(bed.work, "C", readings.take, credit=2, on_missing=make)
    bed.pulls.append(readings.loop)
    bed.group.create_task(readings.loop.run())
    await bed.a.publish(bed.subject(), b"1")
    [first] = await readings.wait(1)
    first.ack()
    await _until_gone(lambda: bed.a.get_message(bed.work, first.stream_seq))
    await bed.a.delete_consumer(bed.work, "C")
    await bed.a.publish(bed.subject(), b"2")
    assert [d.data for d in await readings.wait(2)] == [b"1", b"2"]


async def a_work_queue_has_one_consumer_per_subject(bed: Bed) -> None:
    await bed.consumer(name="C1")
    await bed.consumer(name="C1")
    await bed.consumer(name="C2", worker="w2")
    with pytest.raises(TopologyError):
        await bed.consumer(name="C3")


async def a_message_with_a_ttl_vanishes_from_its_queue(bed: Bed) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    ack = await bed.a.publish(bed.subject(), b"", ttl_s=0.4)  # rounded up to a second
    await asyncio.sleep(0.6)
    there = await bed.a.get_message(bed.work, ack.seq)
    assert there is not None or loop.time() - started >= 1.0
    await _until_gone(lambda: bed.a.get_message(bed.work, ack.seq))
    assert loop.time() - started >= 1.0


async def an_expected_sequence_makes_a_publish_create_once(bed: Bed) -> None:
    subject = bed.subjects.result("job1")
    await bed.a.publish(subject, b"1", expect_last_subject_seq=0)
    with pytest.raises(RevisionConflict):
        await bed.a.publish(subject, b"2", expect_last_subject_seq=0)


async def messages_of_subjects_are_counted_and_listed(bed: Bed) -> None:
    for worker, n in (("w1", 2), ("w2", 1)):
        for i in range(n):
            await bed.a.publish(bed.subject(worker), b"%d" % i)
    counts = await bed.b.subject_counts(bed.work, bed.subjects.work_filter(POOL))
    assert counts == {bed.subject("w1"): 2, bed.subject("w2"): 1}
    listed = await bed.b.subject_messages(bed.work, bed.subject("w1"))
    assert [m.data for m in listed] == [b"0", b"1"]
    assert [m.data for m in await bed.b.subject_messages(bed.work, bed.subject("w1"), limit=1)] == [b"0"]
    assert await bed.b.subject_messages(bed.work, bed.subject("w3")) == []
    assert await bed.b.subject_counts(bed.work, bed.subject("w3")) == {}


async def a_publish_to_no_stream_is_refused(bed: Bed) -> None:
    with pytest.raises(TopologyError):
        await bed.a.publish(f"{bed.subjects.prefix}.nowhere", b"")


async def plain_subscribers_see_refused_and_duplicate_publishes(bed: Bed) -> None:
    seen: list[bytes] = []
    subject = bed.subjects.req(POOL, "hi")
    await bed.b.subscribe(subject, lambda m: seen.append(m.data))
    await asyncio.sleep(0.1)
    await bed.a.publish(subject, b"1", msg_id="1")
    await bed.a.publish(subject, b"1 again", msg_id="1")
    await bed.a.publish(subject, b"2")
    with pytest.raises(QueueFull):
        await bed.a.publish(subject, b"refused")
    await asyncio.sleep(0.2)
    assert seen == [b"1", b"1 again", b"2", b"refused"]


async def a_core_message_to_a_stream_is_stored_too(bed: Bed) -> None:
    seen: list[bytes] = []
    await bed.b.subscribe(bed.subjects.load_filter(POOL), lambda m: seen.append(m.data))
    await asyncio.sleep(0.1)
    bed.a.send(bed.subjects.load(POOL, "w1"), b"1")
    bed.a.send(bed.subjects.load(POOL, "w1"), b"2")
    await asyncio.sleep(0.2)
    assert seen == [b"1", b"2"]
    stored = await bed.a.subject_messages(bed.subjects.stream("LOAD"), bed.subjects.load(POOL, "w1"))
    assert [m.data for m in stored] == [b"2"]  # the stream keeps the last


async def requests_are_answered_refused_or_time_out(bed: Bed) -> None:
    def answer(message: Message) -> None:
        bed.b.send(message.reply, message.data.upper())

    subscription = await bed.b.subscribe(bed.subjects.control("c1"), answer)
    await bed.b.subscribe(bed.subjects.control("silent"), lambda _: None)
    await asyncio.sleep(0.1)
    assert await bed.a.request(bed.subjects.control("c1"), b"hi", timeout_s=2.0) == b"HI"
    with pytest.raises(NoResponder):
        await bed.a.request(bed.subjects.control("c2"), b"hi", timeout_s=2.0)
    with pytest.raises(RequestTimeout):
        await bed.a.request(bed.subjects.control("silent"), b"hi", timeout_s=0.2)
    await subscription.unsubscribe()
    await asyncio.sleep(0.1)
    with pytest.raises(NoResponder):
        await bed.a.request(bed.subjects.control("c1"), b"hi", timeout_s=2.0)


async def broadcasts_reach_all_and_a_queue_group_one(bed: Bed) -> None:
    seen: list[str] = []
    subject = bed.subjects.cancel(POOL)
    for name, messaging in (("a", bed.a), ("b", bed.b)):
        await messaging.subscribe(subject, partial(_note, seen, name))
        await messaging.subscribe(subject, lambda _: seen.append("group"), queue="q")
    await asyncio.sleep(0.1)
    bed.a.send(subject, b"")
    await asyncio.sleep(0.2)
    assert sorted(seen) == ["a", "b", "group"]


async def keys_change_only_by_their_last_revision(bed: Bed) -> None:
    bucket, other = bed.a.bucket(bed.subjects.bucket("members")), bed.b.bucket(bed.subjects.bucket("members"))
    assert await bucket.get("k") is None
    first = await bucket.create("k", b"1")
    with pytest.raises(RevisionConflict):
        await other.create("k", b"x")
    second = await bucket.update("k", b"2", revision=first)
    with pytest.raises(RevisionConflict):
        await other.update("k", b"x", revision=first)
    with pytest.raises(RevisionConflict):
        await other.delete("k", revision=first)
    entry = await other.get("k")
    assert entry is not None
    assert (entry.value, entry.revision) == (b"2", second)
    await bucket.delete("k", revision=second)
    assert await bucket.get("k") is None
    with pytest.raises(RevisionConflict):
        await bucket.update("k", b"x", revision=second)
    third = await other.create("k", b"3")
    assert third > second
    await bucket.put("j", b"4")
    assert sorted((e.key, e.value) for e in await bucket.entries()) == [("j", b"4"), ("k", b"3")]


async def an_expired_key_is_absent_and_can_be_made_again(bed: Bed) -> None:
    bucket = bed.a.bucket(bed.subjects.bucket("members"))
    revision = await bucket.create("lease", b"1", ttl_s=2.0)
    await asyncio.sleep(0.6)
    renewed = asyncio.get_running_loop().time()
    revision = await bucket.update("lease", b"2", revision=revision, ttl_s=1.0)
    await _until_gone(lambda: bucket.get("lease"))
    assert asyncio.get_running_loop().time() - renewed >= 1.0
    assert await bucket.entries() == []
    with pytest.raises(RevisionConflict):
        await bucket.update("lease", b"zombie", revision=revision, ttl_s=1.0)
    await bucket.create("lease", b"3", ttl_s=1.0)


async def a_watch_lists_then_follows_and_tells_expiry_from_deletion(bed: Bed) -> None:
    bucket = bed.a.bucket(bed.subjects.bucket("members"))
    await bucket.put("x.old", b"1")
    await bucket.put("y.old", b"1")
    changes: list[Change] = []
    watch = bed.b.bucket(bed.subjects.bucket("members")).watch(changes.append, "x.>")
    task = bed.group.create_task(watch.run())
    await watch.ready(3.0)
    assert [(c.key, c.value) for c in changes] == [("x.old", b"1")]
    await bucket.put("y.new", b"2")
    await bucket.put("x.new", b"2", ttl_s=1.0)
    await bucket.delete("x.old")
    async with asyncio.timeout(4.0):
        while len(changes) < 4:
            await asyncio.sleep(0.05)
    task.cancel()
    assert [(c.key, c.kind) for c in changes[1:]] == [("x.new", "put"), ("x.old", "delete"), ("x.new", "expired")]


async def a_reader_follows_a_stream_in_order(bed: Bed) -> None:
    stream, mine, other = bed.subjects.stream("KV"), bed.subjects.kv("p", "w"), bed.subjects.kv("q", "w")
    for number in range(5):
        await bed.a.publish(mine, b"%d" % number)
        await bed.a.publish(other, b"not mine")
    follow = bed.b.follow(stream, bed.subjects.kv_filter("p"), start_seq=3, batch=2)
    found: list[tuple[int, bytes]] = []
    while len(found) < 4:
        found += [(message.seq, message.data) for message in (await follow.next()).messages]
    waiting = asyncio.ensure_future(follow.next())
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await bed.a.publish(mine, b"5")
    found += [(message.seq, message.data) for message in (await waiting).messages]
    assert found == [(3, b"1"), (5, b"2"), (7, b"3"), (9, b"4"), (11, b"5")]
    assert follow.position == 11
    await follow.close()


async def a_stream_purged_ahead_of_its_reader_says_so(bed: Bed) -> None:
    stream, mine = bed.subjects.stream("KV"), bed.subjects.kv("p", "w")
    empty = await bed.a.stream_state(stream, subject=mine)
    assert (empty.first_seq, empty.last_seq, empty.messages, empty.last_of_subject) == (1, 0, 0, 0)
    for number in range(6):
        await bed.a.publish(mine, b"%d" % number)
    await bed.a.publish(bed.subjects.kv("q", "w"), b"not mine")
    assert await bed.a.purge_stream(stream, subject=bed.subjects.kv_filter("p"), up_to_seq=4) == 4
    state = await bed.a.stream_state(stream, subject=bed.subjects.kv_filter("p"))
    assert (state.first_seq, state.last_seq, state.messages, state.last_of_subject) == (5, 7, 3, 6)
    late = bed.b.follow(stream, bed.subjects.kv_filter("p"), start_seq=3)
    with pytest.raises(StreamTrimmed):
        await late.next()
    await late.close()
    assert await bed.a.purge_stream(stream) == 3
    assert (await bed.a.stream_state(stream)).first_seq == 8


async def objects_are_kept_whole(bed: Bed) -> None:
    objects = bed.a.objects(bed.subjects.bucket("models"))
    data = bytes(range(256)) * 100
    digest = await objects.put("f", data)
    assert len(digest) == 64
    assert await bed.b.objects(bed.subjects.bucket("models")).get("f") == data


SCENARIOS: dict[str, Callable[[Bed], Awaitable[None]]] = {
    name: made
    for name, made in list(globals().items())
    if asyncio.iscoroutinefunction(made) and made.__module__ == __name__ and name != "run" and name[0] != "_"
}
