from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.encoding.server import DamagedEmbeddings, in_order, object_name, seal, unseal

WORKERS = st.lists(st.text("abcdefgh", min_size=1, max_size=6), min_size=1, max_size=8, unique=True)


@given(st.lists(st.tuples(st.text(max_size=5), st.none() | st.text(max_size=5), st.text(max_size=5), st.binary(max_size=20))))
def test_a_name_is_that_of_one_item_of_one_encoder_and_one_salt(items: list[tuple[str, str | None, str, bytes]]) -> None:
    names = {item: object_name(*item) for item in items}
    assert len(set(names.values())) == len(names)
    assert all(object_name(*item) == name for item, name in names.items())


@given(st.text(), WORKERS, st.data())
def test_an_item_stays_with_its_encode_worker_whoever_else_comes_or_goes(
    name: str, workers: list[str], data: st.DataObject
) -> None:
    order = in_order(name, workers)
    assert sorted(order) == sorted(workers)
    left = data.draw(st.lists(st.sampled_from(workers), unique=True))
    assert in_order(name, left) == [worker for worker in order if worker in left]
    assert in_order(name, reversed(workers)) == order


def test_each_encode_worker_has_its_share_of_the_items() -> None:
    first = Counter(
        in_order(object_name("e", None, "image", bytes([n % 256, n // 256])), ["a", "b", "c"])[0] for n in range(600)
    )
    assert set(first) == {"a", "b", "c"}
    assert min(first.values()) > 120


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
