"""What of a prompt an engine should find in its cache, in blocks of the pool and of the engine."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.workers import metrics
from headrace.workers.engine import KvEvent, Tier
from headrace.workers.kv.feed import BatchReader, cached_tokens, tier_of

CHAIN = [10, 20, 30, 40, 50, 60, 70, 80]


def test_whole_blocks_are_counted_up_to_the_first_that_is_missing() -> None:
    assert cached_tokens(CHAIN, 1000, block_size=16, cache={10, 20, 40}) == 32
    assert cached_tokens(CHAIN, 1000, block_size=16, cache={20, 30}) == 0


def test_at_least_a_token_is_left_to_be_computed() -> None:
    assert cached_tokens(CHAIN, 128, block_size=16, cache={*CHAIN}) == 112
    assert cached_tokens(CHAIN, 129, block_size=16, cache={*CHAIN}) == 128
    assert cached_tokens(CHAIN, 128, block_size=16, cache={*CHAIN}, engine_block=64) == 64


def test_a_part_of_a_block_of_the_engine_is_of_no_use() -> None:
    """A prompt that leaves another in the middle of the engine's block shares the first blocks of the pool in it."""
    assert cached_tokens(CHAIN, 1000, block_size=16, cache={10, 20, 30, 40, 50, 60}, engine_block=64) == 64
    assert cached_tokens(CHAIN, 1000, block_size=16, cache={10, 20, 30}, engine_block=64) == 0


def test_of_an_engine_whose_blocks_are_no_multiple_nothing_is_known() -> None:
    assert cached_tokens(CHAIN, 1000, block_size=16, cache={*CHAIN}, engine_block=24) == 0
    assert cached_tokens(CHAIN, 1000, block_size=0, cache={*CHAIN}, engine_block=16) == 0


@given(st.integers(1, 400), st.sampled_from([1, 2, 16]), st.integers(1, 4), st.sets(st.sampled_from(CHAIN)))
def test_what_is_found_is_whole_blocks_of_the_engine_and_less_than_the_prompt(
    tokens: int, size: int, each: int, cache: set[int]
) -> None:
    found = cached_tokens(CHAIN, tokens, block_size=size, cache=cache, engine_block=each * size)
    assert found % (each * size) == 0
    assert 0 <= found < tokens
    assert {*CHAIN[: found // size]} <= cache
    assert found <= cached_tokens(CHAIN, tokens, block_size=size, cache=cache)


class Batch(msgspec.Struct, array_like=True):
    events: list[str]


TIERS: dict[str, Tier] = {"GPU": "device", "CPU": "host"}


def event(medium: str) -> KvEvent:
    return KvEvent(kind="removed", tier=tier_of(medium, TIERS), hashes=[1])


reader = BatchReader("an engine", msgspec.msgpack.Decoder(Batch), event)


def test_events_are_translated_in_order() -> None:
    batch = reader.read(7, msgspec.msgpack.encode([["GPU", "CPU"]]))
    assert batch.number == 7
    assert [found.tier for found in batch] == ["device", "host"]
    assert not batch.partial


@pytest.mark.parametrize("payload", [b"\xc1", msgspec.msgpack.encode([["GPU", "TAPE"]])])
def test_an_unreadable_batch_clears_what_is_known(payload: bytes) -> None:
    counter = metrics.KV_TROUBLE.labels("malformed")
    before = counter._value.get()
    batch = reader.read(7, payload)
    assert ([found.kind for found in batch], batch.partial) == (["cleared"], True)
    assert counter._value.get() == before + 1


def test_without_a_medium_a_block_is_on_the_device_and_unknown_ones_are_named() -> None:
    assert tier_of(None, TIERS) == "device"
    with pytest.raises(ValueError, match="'TAPE' is unknown; known: GPU, CPU"):
        tier_of("TAPE", TIERS)
