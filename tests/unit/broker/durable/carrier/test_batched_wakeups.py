"""Tasks that wait go on together, and one that is cancelled takes no other with it."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker.durable.carrier.batched_wakeups import BatchedWakeups


async def test_those_who_wait_go_on_in_one_turn_of_the_event_loop() -> None:
    turns, gone = BatchedWakeups(0.001), list[int]()

    async def one(number: int) -> None:
        await turns.next()
        gone.append(number)

    waiting = [asyncio.create_task(one(number)) for number in range(5)]
    while not gone:
        await asyncio.sleep(0)
    assert gone == [0, 1, 2, 3, 4]
    await asyncio.gather(*waiting)


async def test_each_turn_is_followed_by_another_for_those_who_come_later() -> None:
    turns = BatchedWakeups(0.001)
    async with asyncio.timeout(10):
        await turns.next()
        await turns.next()


async def test_one_that_is_cancelled_does_not_end_the_wait_of_others() -> None:
    turns = BatchedWakeups(0.001)
    one, other = asyncio.create_task(turns.next()), asyncio.create_task(turns.next())
    await asyncio.sleep(0)
    one.cancel()
    async with asyncio.timeout(10):
        await other
    with pytest.raises(asyncio.CancelledError):
        await one
