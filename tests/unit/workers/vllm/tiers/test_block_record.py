"""A block comes back as it was written, under its own name, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.vllm.tiers.block_record import DamagedBlock, seal, unseal


@given(name=st.text(max_size=40), data=st.binary(max_size=300))
def test_a_block_comes_back_as_it_was_written(name: str, data: bytes) -> None:
    assert bytes(unseal(name, seal(name, memoryview(data)), size=len(data))) == data


@given(data=st.binary(min_size=1, max_size=100), where=st.integers(min_value=0), bit=st.integers(0, 7))
def test_one_wrong_bit_is_found_wherever_it_is(data: bytes, where: int, bit: int) -> None:
    record = bytearray(seal("a", data))
    at = where % len(record)
    record[at] ^= 1 << bit
    if 5 <= at < 8:  # room for later
        assert bytes(unseal("a", record, size=len(data))) == data
        return
    with pytest.raises(DamagedBlock, match="block a"):
        unseal("a", record, size=len(data))


@given(data=st.binary(max_size=100), cut=st.integers(min_value=0))
def test_a_record_that_was_cut_is_refused(data: bytes, cut: int) -> None:
    record = seal("a", data)
    with pytest.raises(DamagedBlock):
        unseal("a", record[: cut % len(record)], size=len(data))


def test_a_block_is_not_taken_for_another_one() -> None:
    with pytest.raises(DamagedBlock, match="the checksum does not fit"):
        unseal("b", seal("a", b"abc"), size=3)


def test_a_block_of_another_size_is_refused() -> None:
    with pytest.raises(DamagedBlock, match="3 bytes, of 3 that were written and 4 that were expected"):
        unseal("a", seal("a", b"abc"), size=4)
