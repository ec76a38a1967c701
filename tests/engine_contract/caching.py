"""Contract of cache events: numbered without a hole, complete for a new reader, and true to what the engine caches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from headrace.broker.blocks import block_chain
from headrace.workers.engine import KvBatch
from headrace.workers.errors import UnsupportedByEngine
from headrace.workers.kv.translator import Translator
from tests.engine_contract.subject import Subject, greedy


class Reading:
    """A reader of an engine's cache events: the batches, and the inventory that they make."""

    def __init__(self, subject: Subject) -> None:
        self.batches: list[KvBatch] = []
        self.translator = Translator(subject.info.block_size, blocks=subject.info.blocks)
        self._subject = subject

    @property
    def held(self) -> set[int]:
        return set(self.translator.device)

    async def read(self) -> None:
        async with contextlib.aclosing(self._subject.engine.kv_events()) as batches:
            async for batch in batches:
                self.batches.append(batch)
                self.translator.apply(batch)

    async def until_held(self, values: list[int]) -> None:
        await self._subject.until(lambda: set(values) <= self.held)


@contextlib.asynccontextmanager
async def reading(subject: Subject) -> AsyncIterator[Reading]:
    reader = Reading(subject)
    task = asyncio.create_task(reader.read())
    try:
        await subject.until(lambda: bool(reader.batches) or task.done())
        yield reader
    finally:
        task.cancel()
        await asyncio.wait([task])


class CachingContract:
    """What the cache holds, and what is said of it."""

    async def test_a_repeated_prompt_is_found_in_the_cache_where_there_is_one(self, subject: Subject) -> None:
        prompt = subject.prompt(500, 4.5)
        first, again = [(await subject.run(prompt, greedy(2)))[0].cached_tokens for _ in range(2)]
        assert first is not None
        assert again is not None
        assert again < len(prompt), "at least one token is computed"
        assert again % subject.info.block_size == 0
        if "kv_events" in subject.declared:
            assert (first, again) == (0, 4 * subject.info.block_size)

    async def test_cache_events_are_refused_where_not_declared(self, subject: Subject) -> None:
        if "kv_events" in subject.declared:
            return
        with pytest.raises(UnsupportedByEngine):
            await anext(subject.engine.kv_events())
        with pytest.raises(UnsupportedByEngine):
            await subject.engine.replay_kv(0)

    async def test_the_first_batch_is_all_that_is_cached_and_the_rest_has_no_hole(self, subject: Subject) -> None:
        if "kv_events" not in subject.declared:
            return
        size = subject.info.block_size
        before = subject.prompt(501, 2.5)
        await subject.ids(before, greedy(2))
        async with reading(subject) as reader:
            assert reader.batches[0][0].kind == "cleared"
            await reader.until_held(block_chain(before, size))
            for n in range(2):
                prompt = subject.prompt(510 + n, 3.5)
                answer = await subject.ids(prompt, greedy(size + 2))
                await reader.until_held(block_chain(prompt + answer[:-1], size))
            numbers = [batch.number for batch in reader.batches]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            anomalies = reader.translator.anomalies
            assert (anomalies.unplaced, anomalies.orphans) == (0, 0)
            await self._replay(subject, reader)

    async def _replay(self, subject: Subject, reader: Reading) -> None:
        kept = {batch.number: list(batch) for batch in await subject.engine.replay_kv(reader.batches[1].number)}
        assert kept, "the last batches can be had again"
        for batch in reader.batches[1:]:
            if batch.number in kept:
                assert kept[batch.number] == list(batch)
        assert max(kept) == reader.batches[-1].number

    async def test_a_salt_is_part_of_what_the_events_say(self, subject: Subject) -> None:
        if not {"kv_events", "cache_salt"} <= subject.declared or not subject.means.events_have_salts:
            return
        prompt, size = subject.prompt(520, 3.5), subject.info.block_size
        async with reading(subject) as reader:
            await subject.ids(prompt, greedy(2), cache_salt="tenant-3")
            await reader.until_held(block_chain(prompt, size, salt="tenant-3"))
            assert not set(block_chain(prompt, size)) & reader.held

    async def test_what_is_dropped_for_others_is_told(self, subject: Subject) -> None:
        if "kv_events" not in subject.declared:
            return
        size, info = subject.info.block_size, subject.info
        prompt = subject.prompt(530, 3.5)
        async with reading(subject) as reader:
            await subject.ids(prompt, greedy(2))
            chain = block_chain(prompt, size)
            await reader.until_held(chain)
            long = min(info.context_length - 2, info.blocks * size - size) / size
            for n in range(4 + 4 * info.blocks * size // info.context_length):
                await subject.ids(subject.prompt(540 + n, long), greedy(1))
                if not set(chain) & reader.held:
                    break
            await subject.until(lambda: not set(chain) & reader.held)
            assert len(reader.held) <= info.blocks
            assert reader.translator.anomalies.unknown_removed == 0
            assert (await subject.run(prompt, greedy(1)))[0].cached_tokens == 0

    async def test_a_reset_clears_the_cache(self, subject: Subject) -> None:
        if not {"kv_events", "operation reset_prefix_cache"} <= subject.declared:
            return
        before, after, size = subject.prompt(600), subject.prompt(601), subject.info.block_size
        async with reading(subject) as reader:
            await subject.ids(before, greedy(2))
            await reader.until_held(block_chain(before, size))
            await subject.idle()
            await subject.engine.control("reset_prefix_cache", {})
            await subject.ids(after, greedy(1))
            await reader.until_held(block_chain(after, size))
            assert not set(block_chain(before, size)) & reader.held
