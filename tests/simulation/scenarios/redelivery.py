"""What becomes of a message that was delivered."""

from __future__ import annotations

import asyncio

from tests.simulation.scenarios.bed import ACK_WAIT_S, Bed, until_gone


async def what_is_not_acked_comes_again(bed: Bed) -> None:
    await bed.consumer()
    reader = bed.reader(bed.a)
    ack = await bed.a.publish(bed.subject(), b"x", headers={"Hr-Attempt": "3"})
    got = await reader.wait(3)
    assert [d.num_delivered for d in got] == [1, 2, 3]
    assert len({d.stored for d in got}) == 1
    assert got[0].stored > 1e9
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
    await until_gone(lambda: bed.a.get_message(bed.work, ack.seq))
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
    await until_gone(lambda: bed.a.get_message(bed.work, ack.seq))


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


async def a_deleted_message_is_neither_there_nor_redelivered(bed: Bed) -> None:
    await bed.consumer()
    reader = bed.reader(bed.a)
    ack = await bed.a.publish(bed.subject(), b"x")
    stored = await bed.a.get_message(bed.work, ack.seq)
    assert stored is not None
    assert (stored.subject, stored.seq, stored.data) == (bed.subject(), ack.seq, b"x")
    held = (await reader.wait(1))[0]
    assert await bed.b.delete_message(bed.work, ack.seq) is True
    assert await bed.b.delete_message(bed.work, ack.seq) is False
    assert await bed.a.get_message(bed.work, ack.seq) is None
    await asyncio.sleep(ACK_WAIT_S / 4)  # on a busy machine a redelivery from before the deletion may still be on its way
    before = len(reader.got)
    held.progress()
    held.ack()
    await asyncio.sleep(2 * ACK_WAIT_S)
    assert len(reader.got) == before
