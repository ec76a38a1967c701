"""Cached blocks of the stand-in for TensorRT-LLM: told, found again, kept apart, and nothing wrong after lost events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.blocks import block_chain
from headrace.workers.engine import KvBatch, KvEvent
from headrace.workers.errors import UnsupportedByEngine
from headrace.workers.kv.translator import Translator
from headrace.workers.trtllm.kv_feed import CacheLedger, KvFeed, KvFeeds, hash_number
from tests.support import tensorrt_llm_stand_in as stand_in
from tests.unit.workers.trtllm.engine_bench import (
    PROMPT,
    CacheView,
    follow,
    inventory,
    running,
    sequence,
    versions,
)


@versions
async def test_salted_blocks_are_never_found_by_others_and_seem_so_to_readers_in_1_2_alone(version: str) -> None:
    """1.2 tells no salts, so readers take salted blocks for those of plain prompts: a guess that is wrong, not an answer."""
    async with running(version=version) as bench:
        await bench.run(sequence("salted", max_tokens=4, cache_salt="one"))
        translator = Translator(32)
        view = CacheView()

        def apply(view: CacheView) -> bool:
            return len(view.held) >= 2

        await follow(bench, view, apply)
        translator.apply(KvBatch([KvEvent(kind="cleared"), *inventory(bench)], 0))
        plain, salted = block_chain(PROMPT, 32), block_chain(PROMPT, 32, salt="one")
        assert [value in translator.device for value in salted] == [version == stand_in.V1_3] * 2
        assert [value in translator.device for value in plain] == [version == stand_in.V1_2] * 2
        await bench.run(sequence("plain", max_tokens=4))
        assert bench.outputs("plain")[0].cached_tokens == 0, "the engine itself keeps them apart"
        await bench.run(sequence("again", max_tokens=4, cache_salt="one"))
        assert bench.outputs("again")[0].cached_tokens == 64


@versions
async def test_blocks_in_the_host_cache_are_told_as_such_and_come_back(version: str) -> None:
    cache = {"max_tokens": 8 * 32, "host_cache_size": 64 << 20}
    async with running(version=version, kv_cache_config=cache) as bench:
        assert (bench.info.blocks, bench.info.extra["host_cache_bytes"]) == (8, 64 << 20)
        for n in range(4):
            await bench.run(sequence(f"s{n}", list(range(n * 1000, n * 1000 + 100)), max_tokens=2))
        view = CacheView()
        await follow(bench, view, lambda view: len(view.held) >= 12)
        assert len(view.tier("device")) <= 8
        assert len(view.tier("host")) >= 4
        await bench.run(sequence("again", list(range(100)), max_tokens=2))
        assert bench.outputs("again")[0].cached_tokens == 96


@versions
async def test_lost_events_are_noticed_and_nothing_wrong_is_told(version: str) -> None:
    async with running(version=version) as bench:
        await bench.run(sequence("a", max_tokens=1))
        await bench.until(lambda: len(inventory(bench)) == 2)
        bench.llm._executor.lose_events(3)
        await bench.run(sequence("b", list(range(500, 540)), max_tokens=1))
        view = CacheView()
        await follow(bench, view, lambda view: view.tier("device") == [tuple(range(500, 532))])
        assert view.partial


async def test_without_a_prefix_cache_there_are_no_events() -> None:
    async with running(kv_cache_config={"enable_block_reuse": False, "max_tokens": 3200}) as bench:
        assert not bench.engine.capabilities.kv_events
        assert bench.info.blocks == 100
        with pytest.raises(UnsupportedByEngine):
            bench.engine.kv_events()


SIZE = 4


def event(number: int, data: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"event_id": number, "data": data, "window_size": 4096, **fields}


def created(number: int = 0, **fields: Any) -> dict[str, Any]:
    return event(number, {"type": "created", "num_blocks_per_cache_level": [100, 50]}, **fields)


def block(name: Any, tokens: list[int], **fields: Any) -> dict[str, Any]:
    described = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
    return {"type": "stored_block", "block_hash": name, "tokens": described, "cache_level": 0, "priority": 35, **fields}


def stored(number: int, parent: Any, *blocks: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return event(number, {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}, **fields)


def removed(number: int, *hashes: Any, **fields: Any) -> dict[str, Any]:
    return event(number, {"type": "removed", "block_hashes": list(hashes)}, **fields)


def moved(number: int, name: Any, new: int, old: int) -> dict[str, Any]:
    level = {"type": "event_diff", "new_value": new, "old_value": old}
    return event(number, {"type": "updated", "block_hash": name, "cache_level": level, "priority": None})


def kinds(events: list[KvEvent]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(one.kind, one.tier, tuple(one.hashes)) for one in events]


def test_blocks_are_stored_with_their_parents_and_removed() -> None:
    ledger = CacheLedger(SIZE)
    events = ledger.apply([created(), stored(1, None, block(10, [1, 2, 3, 4]), block(11, [5, 6, 7, 8])), removed(2, 11)]).events
    assert kinds(events) == [("stored", "device", (10,)), ("stored", "device", (11,)), ("removed", "device", (11,))]
    assert [(one.parent, tuple(one.token_ids)) for one in events[:2]] == [(None, (1, 2, 3, 4)), (10, (5, 6, 7, 8))]
    assert kinds(ledger.inventory()) == [("stored", "device", (10,))]
    assert ledger.levels == (100, 50)


def test_a_partial_block_is_neither_told_nor_missed_when_it_goes() -> None:
    ledger = CacheLedger(SIZE)
    events = ledger.apply([created(), stored(1, None, block(10, [1, 2, 3, 4]), block(11, [5])), removed(2, 11)]).events
    assert kinds(events) == [("stored", "device", (10,))]


def test_a_block_that_goes_to_host_memory_changes_its_tier() -> None:
    ledger = CacheLedger(SIZE)
    ledger.apply([created(), stored(1, None, block(10, [1, 2, 3, 4]))])
    assert kinds(ledger.apply([moved(2, 10, 1, 0)]).events) == [("stored", "host", (10,)), ("removed", "device", (10,))]
    assert kinds(ledger.apply([removed(3, 10)]).events) == [("removed", "host", (10,))]


def test_a_change_of_priority_alone_changes_nothing() -> None:
    ledger = CacheLedger(SIZE)
    ledger.apply([created(), stored(1, None, block(10, [1, 2, 3, 4]))])
    update = {"type": "updated", "block_hash": 10, "cache_level": None, "priority": {"new_value": 1, "old_value": 2}}
    assert ledger.apply([event(2, update)]).events == []


def test_a_gap_clears_what_is_known_of_that_rank_and_keeps_the_others() -> None:
    feeds = KvFeeds(SIZE, ranks=2)
    for rank in (0, 1):
        feeds.put([created(attention_dp_rank=rank), stored(1, None, block(10 + rank, [1, 2, 3, 4]), attention_dp_rank=rank)])
    feeds.put([stored(5, None, block(20, [9, 9, 9, 9]), attention_dp_rank=0)])
    assert kinds(feeds[0].inventory()) == [("stored", "device", (20,))]
    assert kinds(feeds[1].inventory()) == [("stored", "device", (11,))]
    assert [batch.partial for batch in (feeds[0].replay(0)[-1], feeds[1].replay(0)[-1])] == [True, False]


@pytest.mark.parametrize("bad", [stored(2, None, block(20, [9, 9, 9, 9]), attention_dp_rank=2), "nonsense"])
def test_an_event_of_no_rank_that_the_engine_has_leaves_nothing_certain_of_any_rank(bad: Any) -> None:
    feeds = KvFeeds(SIZE, ranks=2)
    for rank in (0, 1):
        feeds.put([created(attention_dp_rank=rank), stored(1, None, block(10 + rank, [1, 2, 3, 4]), attention_dp_rank=rank)])
    feeds.put([bad])
    assert [feeds[rank].inventory() for rank in (0, 1)] == [[], []]
    assert all(feeds[rank].replay(0)[-1].partial for rank in (0, 1))


def test_a_first_event_that_is_not_the_first_is_a_gap() -> None:
    ledger = CacheLedger(SIZE)
    assert kinds(ledger.apply([stored(7, None, block(10, [1, 2, 3, 4]))]).events)[0][0] == "cleared"
    assert ledger.partial


def test_a_cache_that_is_made_anew_begins_empty_and_is_wholly_known() -> None:
    ledger = CacheLedger(SIZE)
    ledger.apply([created(), stored(1, None, block(10, [1, 2, 3, 4])), removed(9, 3)])
    assert ledger.partial
    assert kinds(ledger.apply([created()]).events) == [("cleared", "device", ())]
    assert not ledger.partial
    assert ledger.inventory() == []


def test_only_the_largest_window_counts() -> None:
    ledger = CacheLedger(SIZE)
    small, large = {"window_size": 512}, {"window_size": 8192}
    events = ledger.apply(
        [
            created(0) | small,
            created(1) | large,
            stored(2, None, block(10, [1, 2, 3, 4])) | small,
            stored(3, None, block(11, [1, 2, 3, 4])) | large,
        ]
    ).events
    assert kinds(events) == [("stored", "device", (11,))]


def test_blocks_of_1_3_have_salts_adapters_media_and_textual_hashes() -> None:
    ledger = CacheLedger(SIZE, {7: "fr"})
    key = {"type": "mm_key", "hash": "0123456789abcdef0011", "start_offset": 2}
    events = ledger.apply(
        [
            created(layer_group_id=0, hash_algo="v2_sha256"),
            stored(1, None, block("ff" * 32, [1, 2, 3, 4], cache_salt="tenant", lora_id=7, mm_keys=[key])),
            stored(2, None, block(12, [1, 2, 3, 4], cache_salt=998877)),
            stored(3, None, block(13, [1, 2, 3, 4], lora_id=8)),
        ]
    ).events
    assert (events[0].salt, events[0].adapter, events[0].media) == ("tenant", "fr", (((0x0123456789ABCDEF, 2),),))
    assert events[0].hashes == ((1 << 64) - 1,)
    assert [tuple(one.token_ids) for one in events[1:]] == [(), ()]  # nothing that a prompt of a known kind could match


@pytest.mark.parametrize(
    "bad",
    [
        {"event_id": 1},
        event(1, {"type": "what"}),
        stored(1, None, block(1, list(range(9)))),
        stored(1, None, block(1, [1, 2, 3, 4], cache_level=9)),
        [],
    ],
)
def test_an_event_that_cannot_be_read_leaves_nothing_certain(bad: Any) -> None:
    ledger = CacheLedger(SIZE)
    ledger.apply([created(), stored(1, None, block(10, [1, 2, 3, 4]))])
    assert kinds(ledger.apply([bad]).events)[-1:] == [("cleared", "device", ())]
    assert ledger.inventory() == []


def test_hashes_are_64_bits() -> None:
    assert [hash_number(one) for one in (-1, "0f", 1 << 64)] == [(1 << 64) - 1, 15, 0]


moves = st.lists(
    st.tuples(st.sampled_from(["store", "remove", "move", "lose"]), st.integers(0, 5), st.integers(0, 1)), max_size=40
)


@given(moves)
def test_a_reader_of_the_changes_knows_what_the_ledger_knows(steps: list[tuple[str, int, int]]) -> None:
    """From whatever the engine tells: the events applied give the inventory, at every step."""
    ledger, view, numbers = CacheLedger(SIZE), CacheView(), {0: 0, 1: 0}
    for what, name, rank in steps:
        if what == "lose":
            numbers[rank] += 2
            continue
        made = {
            "store": lambda n, name=name: stored(n, None, block(name, [name] * SIZE)),
            "remove": lambda n, name=name: removed(n, name),
            "move": lambda n, name=name: moved(n, name, 1, 0),
        }[what](numbers[rank])
        numbers[rank] += 1
        view.apply(ledger.apply([made | {"attention_dp_rank": rank}]).events)
        fresh = CacheView()
        fresh.apply(ledger.inventory())
        assert view.held == fresh.held


async def test_a_reader_that_falls_behind_what_is_kept_begins_anew() -> None:
    feed = KvFeed(CacheLedger(SIZE), kept=2)
    feed.put([created()])
    reader = feed.read()
    assert [batch.kind for batch in await anext(reader)] == ["cleared"]
    for n in range(5):
        feed.put([stored(n + 1, None, block(n + 1, [n] * SIZE))])
    batch = await anext(reader)
    assert (batch[0].kind, len(batch), batch.number, batch.partial) == ("cleared", 6, 4, False)
    feed.put([removed(6, 1)])
    assert kinds(await anext(reader)) == [("removed", "device", (1,))]
    assert [one.number for one in feed.replay(0)] == [4, 5]
    await reader.aclose()
