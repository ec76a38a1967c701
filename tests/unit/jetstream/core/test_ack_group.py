"""Answers that are waited for together: the wait ends with the last of them."""

from __future__ import annotations

import asyncio

from headrace.jetstream.core.ack_group import AckGroup


async def test_the_wait_ends_with_the_last_outcome() -> None:
    group = AckGroup[int]()
    first, second = group.part(), group.part()
    waiting = asyncio.create_task(group.all())
    await asyncio.sleep(0)
    first.set_result(1)
    await asyncio.sleep(0)
    assert not waiting.done()
    second.set_exception(error := ValueError("no"))
    await waiting
    assert (first.outcome, second.outcome) == (1, error)
    assert first.done()
    assert second.done()


async def test_what_has_its_outcomes_is_not_waited_for() -> None:
    group = AckGroup[int]()
    await group.all()
    group.part().set_result(1)
    await group.all()


async def test_an_outcome_after_the_wait_was_given_up_is_fine() -> None:
    group = AckGroup[int]()
    part = group.part()
    waiting = asyncio.create_task(group.all())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    part.set_result(1)
    assert part.outcome == 1
