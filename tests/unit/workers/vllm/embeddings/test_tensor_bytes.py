from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.vllm.embeddings import tensor_bytes
from headrace.workers.vllm.embeddings.tensor_bytes import Embeddings, UnusableEmbeddings, pack, unpack

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


@given(st.integers(1, 5), st.integers(1, 7), st.sampled_from(sorted(SIZES)), st.data())
def test_embeddings_come_back_as_they_were(rows: int, width: int, dtype: str, draw: st.DataObject) -> None:
    size = rows * width * SIZES[dtype]
    data = draw.draw(st.binary(min_size=size, max_size=size))
    made = unpack(pack(Embeddings(rows, width, dtype, data)))
    assert (made.rows, made.width, made.dtype, bytes(made.data)) == (rows, width, dtype, data)


@given(st.binary(max_size=60))
def test_what_is_no_record_is_refused(garbage: bytes) -> None:
    with pytest.raises(UnusableEmbeddings):
        unpack(garbage)


@pytest.mark.parametrize("change", [-1, 1, -16])
def test_a_record_with_too_few_or_too_many_bytes_is_refused(change: int) -> None:
    record = pack(Embeddings(2, 3, "float32", bytes(24)))
    with pytest.raises(UnusableEmbeddings):
        unpack(record[:change] if change < 0 else record + bytes(change))


def test_a_type_of_numbers_that_no_record_has_is_named() -> None:
    with pytest.raises(UnusableEmbeddings, match=r"'int8'.*float32"):
        pack(Embeddings(1, 1, "int8", b"1"))


def test_what_is_too_large_or_empty_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_bytes, "MOST_BYTES", 40)
    pack(Embeddings(5, 2, "float32", bytes(40)))
    for rows, width in ((11, 1), (0, 4), (4, 0)):
        with pytest.raises(UnusableEmbeddings, match=f"{rows} rows of {width}"):
            pack(Embeddings(rows, width, "float32", bytes(rows * width * 4)))
