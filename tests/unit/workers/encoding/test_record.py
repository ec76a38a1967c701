from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.encoding.record import DamagedEmbeddings, seal, unseal


@given(st.text(max_size=70), st.binary(max_size=300))
def test_embeddings_come_back_as_they_were(name: str, data: bytes) -> None:
    assert unseal(name, seal(name, data)) == data


@given(st.binary(min_size=1, max_size=100), st.data())
def test_a_record_with_one_other_byte_is_refused(data: bytes, draw: st.DataObject) -> None:
    record = bytearray(seal("a", data))
    at = draw.draw(st.integers(0, len(record) - 1).filter(lambda n: not 5 <= n < 8))  # three bytes mean nothing
    record[at] ^= draw.draw(st.integers(1, 255))
    with pytest.raises(DamagedEmbeddings):
        unseal("a", bytes(record))


@given(st.binary(max_size=100), st.integers(1, 200))
def test_a_record_that_is_cut_off_is_refused(data: bytes, less: int) -> None:
    record = seal("a", data)
    with pytest.raises(DamagedEmbeddings):
        unseal("a", record[: max(0, len(record) - less)])


def test_the_embeddings_of_another_item_are_refused() -> None:
    with pytest.raises(DamagedEmbeddings, match="checksum"):
        unseal("b", seal("a", b"same bytes"))


def test_a_record_of_a_later_version_is_refused() -> None:
    record = bytearray(seal("a", b"x"))
    record[4] = 2
    with pytest.raises(DamagedEmbeddings, match="version 2"):
        unseal("a", bytes(record))
