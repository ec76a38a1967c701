"""What is kept, and read without being consumed: streams, buckets, objects."""

from __future__ import annotations

import asyncio

import pytest

from headrace.jetstream.errors import ObjectNotFound, RevisionConflict, StreamTrimmed
from headrace.jetstream.ports import Change
from tests.simulation.scenarios.bed import POOL, Bed, until_gone


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


async def the_last_messages_of_many_subjects_are_read_at_once(bed: Bed) -> None:
    rsp = [bed.subjects.rsp("t", f"j{i}") for i in range(4)]
    stored = [await bed.a.publish(rsp[i], b"%d" % n) for n in range(2) for i in (0, 2)]
    found = await bed.b.last_messages(bed.subjects.stream("RSP"), rsp)
    assert sorted((m.subject, m.seq, m.data) for m in found) == [(rsp[0], stored[2].seq, b"1"), (rsp[2], stored[3].seq, b"1")]
    assert all(m.at > 1e9 for m in found)
    assert await bed.b.last_messages(bed.subjects.stream("RSP"), [rsp[1]]) == []
    later = await bed.b.subject_messages(bed.subjects.stream("RSP"), bed.subjects.rsp("t", "j2"), start_seq=stored[1].seq + 1)
    assert [m.data for m in later] == [b"1"]


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
    await until_gone(lambda: bucket.get("lease"))
    assert asyncio.get_running_loop().time() - renewed >= 1.0
    assert await bucket.entries() == []
    with pytest.raises(RevisionConflict):
        await bucket.update("lease", b"zombie", revision=revision, ttl_s=1.0)
    await bucket.create("lease", b"3", ttl_s=1.0)


async def a_key_tells_why_it_is_absent(bed: Bed) -> None:
    bucket = bed.a.bucket(bed.subjects.bucket("members"))
    assert await bucket.state("k") == "unknown"
    revision = await bucket.create("k", b"1", unmarked=True)
    assert await bucket.state("k") == "present"
    with pytest.raises(RevisionConflict):
        await bucket.create("k", b"x", unmarked=True)
    await bucket.delete("k", revision=revision)
    assert await bucket.state("k") == "deleted"
    with pytest.raises(RevisionConflict):
        await bucket.create("k", b"x", unmarked=True)
    await bucket.create("k", b"2", ttl_s=1.0)
    await until_gone(lambda: bucket.get("k"))
    assert await bucket.state("k") == "expired"
    with pytest.raises(RevisionConflict):
        await bucket.create("k", b"x", unmarked=True)
    assert await bucket.age_s() > 1.0


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


async def objects_are_written_and_read_in_pieces(bed: Bed) -> None:
    objects = bed.a.objects(bed.subjects.bucket("files"))
    data = bytes(range(256)) * 2000
    async with objects.writer("dir/f") as writer:
        for at in range(0, len(data), 100_000):
            await writer.write(data[at : at + 100_000])
        with pytest.raises(ObjectNotFound):
            await objects.info("dir/f")
        stored = await writer.commit(metadata={"kind": "test"})
    async with objects.writer("dir/g") as left:
        await left.write(b"unfinished")
    other = bed.b.objects(bed.subjects.bucket("files"))
    found = await other.info("dir/f")
    assert (found.size, found.digest, dict(found.metadata)) == (len(data), stored.digest, {"kind": "test"})
    assert [one.name for one in await other.list("dir/")] == ["dir/f"]
    assert b"".join([piece async for piece in other.chunks("dir/f")]) == data
    assert b"".join([piece async for piece in other.chunks("dir/f", offset=131_000, length=200)]) == data[131_000:131_200]
    assert b"".join([piece async for piece in other.chunks("dir/f", offset=511_990)]) == data[511_990:]
