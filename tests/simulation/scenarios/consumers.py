"""Who gets which message, and who gets none."""

from __future__ import annotations

import asyncio

import pytest

from headrace.jetstream.errors import TopologyError
from tests.simulation.scenarios.bed import Bed, Readings, until_gone


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
    await until_gone(lambda: bed.a.get_message(bed.work, first.stream_seq))
    await bed.a.delete_consumer(bed.work, "C")
    await bed.a.publish(bed.subject(), b"2")
    assert [d.data for d in await readings.wait(2)] == [b"1", b"2"]


async def a_work_queue_has_one_consumer_per_subject(bed: Bed) -> None:
    await bed.consumer(name="C1")
    await bed.consumer(name="C1")
    await bed.consumer(name="C2", worker="w2")
    with pytest.raises(TopologyError):
        await bed.consumer(name="C3")
