"""Work over many items is bounded, and its first error comes out as it is."""

import asyncio

import pytest

from headrace.broker.batches.bounded_concurrency import for_each


async def test_each_item_is_done_once_and_only_so_many_at_a_time() -> None:
    running = most = 0
    done: list[int] = []

    async def work(item: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        done.append(item)

    await for_each(range(50), work, at_once=4)
    assert (sorted(done), most) == (list(range(50)), 4)


async def test_the_first_error_ends_the_rest() -> None:
    begun: list[int] = []

    async def work(item: int) -> None:
        begun.append(item)
        await asyncio.sleep(0)
        raise ValueError(item)

    with pytest.raises(ValueError, match="0"):
        await for_each(range(50), work, at_once=2)
    assert len(begun) == 2


async def test_no_items_are_no_work() -> None:
    async def work(item: int) -> None:
        raise AssertionError(item)

    await for_each([], work, at_once=0)
