"""Iterators that end, stay ended, raise or are not there yet are all polled until they are empty."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.workers.trtllm.polling import keep_polling, poll_once


class Iterator:
    def __init__(self, items: list[Any], end: BaseException | None = None) -> None:
        self.items, self.end, self.marked = items, end, 0

    def mark_undone(self) -> None:
        self.marked += 1

    def __call__(self, timeout: float) -> Iterator:
        return self

    def __aiter__(self) -> Iterator:
        return self

    async def __anext__(self) -> Any:
        if self.items:
            return self.items.pop(0)
        raise self.end or StopAsyncIteration


@pytest.mark.parametrize("end", [None, IndexError(), asyncio.QueueEmpty(), TimeoutError()])
async def test_all_items_are_taken_whatever_ends_them(end: BaseException | None) -> None:
    reports = Iterator([{"a": 1}, [{"b": 2}, {"c": 3}]], end)
    assert await poll_once(reports) == [{"a": 1}, {"b": 2}, {"c": 3}]
    assert reports.marked == 1  # or an iterator of 1.2 would stay ended


async def test_before_the_first_request_there_is_nothing() -> None:
    def ask(timeout: float) -> AsyncIterator[Any]:
        raise AssertionError("KV Event IterationResult is not properly instantiated.")

    assert await poll_once(ask) == []


async def test_a_poll_that_fails_is_tried_again() -> None:
    found: list[Any] = []
    answers: list[Any] = [RuntimeError("broken"), [{"a": 1}, {}]]

    def ask(timeout: float) -> Any:
        answer = answers.pop(0) if answers else []
        if isinstance(answer, Exception):
            raise answer
        return Iterator(answer)

    task = asyncio.create_task(keep_polling(ask, found.extend, lambda: False, what="test"))
    async with asyncio.timeout(5):
        while not found:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    assert found == [{"a": 1}]
