"""Block identity, with golden vectors: the values must never change and any language must reach them."""

from __future__ import annotations

from collections.abc import Sequence

import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.blocks import MediaSpan, block_chain, chain_seed, extend_chain
from headrace.broker.codec import pack_u32

GOLDEN = [
    (range(64), 32, {}, [3769686076003069549, 13174353109931346803]),
    ([2**32 - 1] * 16, 16, {}, [8760325919831428175]),
    (range(64), 32, {"adapter": "lora-a"}, [17655679805440580763, 17568252172287788502]),
    (range(64), 32, {"salt": "tenant1"}, [7658592611588433149, 1125851445147910437]),
    (
        range(64),
        32,
        {"media": [MediaSpan(30, 8, 0x0123456789ABCDEF)]},
        [12299208331707458481, 1615737943681616982],
    ),
]


def reference(ids: list[int], size: int, seed: int) -> list[int]:
    """The definition, written out."""
    chain = []
    for start in range(0, len(ids) - size + 1, size):
        data = b"".join(i.to_bytes(4, "little") for i in ids[start : start + size])
        seed = xxhash.xxh3_64(data, seed=seed).intdigest()
        chain.append(seed)
    return chain


@pytest.mark.parametrize(("ids", "size", "options", "expected"), GOLDEN)
def test_golden_vectors(ids: Sequence[int], size: int, options: dict, expected: list[int]) -> None:
    assert block_chain(list(ids), size, **options) == expected


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.integers(1, 17))
def test_the_chain_is_its_definition_and_packed_ids_give_the_same(ids: list[int], size: int) -> None:
    chain = block_chain(ids, size)
    assert chain == reference(ids, size, 0)
    assert block_chain(pack_u32(ids), size) == chain
    assert len(chain) == len(ids) // size


def test_adapter_and_salt_open_another_chain() -> None:
    seeds = {chain_seed(a, s) for a in (None, "x") for s in (None, "x")}
    assert len(seeds) == 4
    assert chain_seed() == 0
    assert chain_seed("a", "s") == xxhash.xxh3_64(msgpack.packb(["a", "s"])).intdigest()
    assert block_chain(range(4), 2, salt="t")[0] != block_chain(range(4), 2)[0]


def test_a_block_depends_on_everything_before_it() -> None:
    assert block_chain([1, 2, 3, 4], 2)[1] != block_chain([9, 2, 3, 4], 2)[1]


def test_a_chain_can_be_extended_block_by_block() -> None:
    whole = block_chain(range(6), 2)
    assert extend_chain(whole[0], [2, 3]) == whole[1]


def test_media_change_the_blocks_they_touch_and_those_after() -> None:
    ids = [7] * 8
    plain = block_chain(ids, 2)
    image = block_chain(ids, 2, media=[MediaSpan(2, 3, 0xABC)])
    assert image[0] == plain[0]
    assert all(a != b for a, b in zip(image[1:], plain[1:], strict=True))
    other = block_chain(ids, 2, media=[MediaSpan(2, 3, 0xABD)])
    assert other[1] != image[1]
    data = pack_u32(ids[2:4]) + (0xABC).to_bytes(8, "little") + (0).to_bytes(4, "little")
    assert image[1] == xxhash.xxh3_64(data, seed=plain[0]).intdigest()


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="0"):
        block_chain([1], 0)
