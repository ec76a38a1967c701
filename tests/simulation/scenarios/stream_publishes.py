"""What a publish to a stream may become: stored once, refused, or expired."""

from __future__ import annotations

import asyncio

import pytest

from headrace.jetstream.errors import QueueFull, RevisionConflict, TopologyError
from headrace.jetstream.topology import request_consumer
from tests.simulation.scenarios.bed import POOL, Bed, Readings, until_gone


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
    await until_gone(lambda: bed.a.get_message(spec.stream, got[0].stream_seq))
    await bed.a.publish(subject, b"")


async def a_moved_request_is_never_refused(bed: Bed) -> None:
    for _ in range(5):
        await bed.a.publish(bed.subjects.req(POOL, "re"), b"")


async def a_message_with_a_ttl_vanishes_from_its_queue(bed: Bed) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    ack = await bed.a.publish(bed.subject(), b"", ttl_s=0.4)  # rounded up to a second
    await asyncio.sleep(0.6)
    there = await bed.a.get_message(bed.work, ack.seq)
    assert there is not None or loop.time() - started >= 1.0
    await until_gone(lambda: bed.a.get_message(bed.work, ack.seq))
    assert loop.time() - started >= 1.0


async def an_expected_sequence_makes_a_publish_create_once(bed: Bed) -> None:
    subject = bed.subjects.result("t", "job1")
    await bed.a.publish(subject, b"1", expect_last_subject_seq=0)
    with pytest.raises(RevisionConflict):
        await bed.a.publish(subject, b"2", expect_last_subject_seq=0)


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
