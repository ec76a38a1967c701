from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.encoding.server import DamagedEmbeddings, in_order, seal, unseal

WORKERS = st.lists(st.text("abcdefgh", min_size=1, max_size=6), min_size=1, max_size=8, unique=True)


@given(st.text(), WORKERS, st.data())
def test_an_item_stays_with_its_encode_worker_whoever_else_comes_or_goes(
    name: str, workers: list[str], data: st.DataObject
) -> None:
    order = in_order(name, workers)
    assert sorted(order) == sorted(workers)
    left = data.draw(st.lists(st.sampled_from(workers), unique=True))
    assert in_order(name, left) == [worker for worker in order if worker in left]
    assert in_order(name, reversed(workers)) == order


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
