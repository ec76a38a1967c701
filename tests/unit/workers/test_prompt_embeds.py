"""Tensors are read out of torch.save's files without torch, and nothing else is read out of them."""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import zipfile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.workers.engine import StoredTensor, read_matrix, read_tensor
from headrace.workers.errors import RequestInvalid

GLOBAL = b"ctorch._utils\n_rebuild_tensor_v2\n"
HOOKS = b"ccollections\nOrderedDict\n)R"


def tuple_of(*numbers: int) -> bytes:
    return b"(" + b"".join(b"J" + struct.pack("<i", number) for number in numbers) + b"t"


def pickled(shape: tuple[int, ...], strides: tuple[int, ...], *, storage: bytes = b"FloatStorage", offset: int = 0) -> bytes:
    place = b"((X\x07\x00\x00\x00storagectorch\n" + storage + b"\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x0ctQ"
    return (
        b"\x80\x02" + GLOBAL + place + b"K" + bytes([offset]) + tuple_of(*shape) + tuple_of(*strides) + b"\x89" + HOOKS + b"tR."
    )


def file(pickle_: bytes, data: bytes = struct.pack("<6f", *range(6)), *, compressed: bool = False, **more: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as archive:
        for name, content in {"data.pkl": pickle_, "data/0": data, "byteorder": b"little", **more}.items():
            archive.writestr(f"archive/{name}", content)
    return out.getvalue()


def numbers(tensor: StoredTensor) -> list[float]:
    return list(tensor.data.cast("f"))


def test_a_tensor_is_read():
    tensor = read_tensor(file(pickled((2, 3), (3, 1))), param="p")
    assert (tensor.dtype, tensor.shape, numbers(tensor)) == ("float32", (2, 3), [0, 1, 2, 3, 4, 5])


def test_a_part_of_a_tensor_is_read_from_where_it_begins():
    tensor = read_tensor(file(pickled((1, 3), (3, 1), offset=2)), param="p")
    assert numbers(tensor) == [2, 3, 4]


def test_the_stride_of_a_dimension_of_one_means_nothing():
    assert read_tensor(file(pickled((1, 6), (99, 1))), param="p").shape == (1, 6)


@pytest.mark.parametrize(("storage", "dtype"), [(b"HalfStorage", "float16"), (b"BFloat16Storage", "bfloat16")])
def test_half_precision_is_read(storage, dtype):
    tensor = read_tensor(file(pickled((3, 4), (4, 1), storage=storage)), param="p")
    assert (tensor.dtype, len(tensor.data)) == (dtype, 24)


def test_a_matrix_may_be_a_batch_of_one_and_nothing_else():
    assert read_matrix(file(pickled((1, 2, 3), (6, 3, 1))), param="p").shape == (2, 3)
    for shape, strides in (((6,), (1,)), ((2, 1, 3), (3, 3, 1)), ((0, 3), (3, 1))):
        with pytest.raises(RequestInvalid, match="tokens × hidden size"):
            read_matrix(file(pickled(shape, strides)), param="p")


class Evil:
    def __reduce__(self) -> Any:
        return print, ("called",)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (b"", "no file of torch.save"),
        (b"PK\x03\x04 nonsense", "no file of torch.save"),
        (file(pickled((2, 3), (1, 2))), "not contiguous"),
        (file(pickled((10**9, 3), (0, 1))), "not contiguous"),
        (file(pickled((2, 4), (4, 1))), "larger than the numbers"),
        (file(pickled((1 << 30, 1 << 30), (1 << 30, 1))), "larger than the numbers"),
        (file(pickled((-1, 3), (3, 1))), "not one plain tensor"),
        (file(pickled((2, 3), (3,))), "not one plain tensor"),
        (file(pickled((2, 3), (3, 1), storage=b"LongStorage")), "LongStorage"),
        (file(pickle.dumps(Evil())), "not one plain tensor"),
        (file(pickle.dumps([1.0, 2.0])), "not one plain tensor"),
        (file(b"\x80\x02."), "not one plain tensor"),
        (file(b"\x80\x02)tR"), "not one plain tensor|no file"),
        (file(b"\xff"), "no file of torch.save"),
        (file(pickled((2, 3), (3, 1)), compressed=True), "compressed"),
        (file(pickled((2, 3), (3, 1)) + b" " * 5000), "larger than it may be"),
        (file(pickled((2, 3), (3, 1)), byteorder=b"big"), "little endian"),
        (file(pickled((2, 3), (3, 1)).replace(b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x001")), "no record 'data/1'"),
        (file(pickled((2, 3), (3, 1)).replace(b"_rebuild_tensor_v2", b"_rebuild_sparse_tensor")), "_rebuild_sparse_tensor"),
    ],
)
def test_anything_else_is_refused_and_never_called(given, why, capsys):
    with pytest.raises(RequestInvalid, match=why) as caught:
        read_tensor(given, param="prompt_embeds")
    assert caught.value.param == "prompt_embeds"
    assert capsys.readouterr().out == ""


def test_a_name_where_a_type_belongs_is_refused():
    place = b"((X\x07\x00\x00\x00storageX\x01\x00\x00\x00aX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x0ctQ"
    crafted = b"\x80\x02" + GLOBAL + place + b"K\x00" + tuple_of(2, 3) + tuple_of(3, 1) + b"\x89" + HOOKS + b"tR."
    with pytest.raises(RequestInvalid, match="not one plain tensor"):
        read_tensor(file(crafted), param="p")


def test_numbers_beyond_any_memory_are_refused():
    huge = b"\x8a\x09" + (1 << 65).to_bytes(9, "little")
    crafted = pickled((2, 3), (3, 1)).replace(b"K\x00" + tuple_of(2, 3), b"K\x00" + b"(" + huge + b"J\x00\x00\x00\x00t")
    with pytest.raises(RequestInvalid):
        read_tensor(file(crafted), param="p")
    offset = pickled((2, 3), (3, 1)).replace(b"tQK\x00", b"tQ" + huge)
    with pytest.raises(RequestInvalid):
        read_tensor(file(offset), param="p")


@settings(max_examples=100, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_file_is_read_or_refused(changes):
    damaged = bytearray(file(pickled((2, 3), (3, 1))))
    for place, value in changes:
        damaged[place % len(damaged)] = value
    with contextlib.suppress(RequestInvalid):
        read_tensor(bytes(damaged), param="p")
