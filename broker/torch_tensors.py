"""Reads one dense tensor from a file that `torch.save` wrote, without torch and without unpickling.

Such files come from clients, and a pickle can build any object.  So only files of the form that a plain tensor has are read:
the pickle's opcodes are followed by hand, no name in them is imported or called, and the numbers come from an uncompressed
record whose size is known before it is read.

Frontend and workers both need this reader, which is why it is in `broker/`.
"""

from __future__ import annotations

import io
import math
import pickletools
import struct
import zipfile
from dataclasses import dataclass
from typing import Any

_DTYPES = {
    "FloatStorage": ("float32", 4),
    "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2),
    "DoubleStorage": ("float64", 8),
}
_MOST_PICKLE = 4096  # bytes; the pickle of a tensor has some 200
_REBUILD = "torch._utils _rebuild_tensor_v2"
_MARK = object()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as stored: `data` holds its numbers in row order, little endian."""

    dtype: str  # float16, bfloat16, float32 or float64
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class _Global:
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    name: str
    record: str


@dataclass(frozen=True, slots=True)
class _Layout:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class TensorUnreadable(Exception):
    """The file is not that of one dense tensor; the message says why."""


def read_tensor(file: bytes) -> StoredTensor:
    """Return the tensor in `file`. Raises TensorUnreadable unless it is one dense float tensor as `torch.save` writes it."""
    try:
        with zipfile.ZipFile(io.BytesIO(file)) as archive:
            return _read(archive)
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        RuntimeError,
        EOFError,
        OSError,
        ValueError,
        OverflowError,
        struct.error,
    ) as error:
        raise TensorUnreadable(f"it is no file of torch.save ({error})") from None


def read_matrix(file: bytes) -> StoredTensor:
    """Return a tensor of two dimensions. Leading dimensions of size 1 are dropped. Raises TensorUnreadable."""
    tensor = read_tensor(file)
    shape = tensor.shape
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2 or 0 in shape:
        raise TensorUnreadable(f"the shape {list(tensor.shape)} is not that of tokens × hidden size")
    return StoredTensor(tensor.dtype, shape, tensor.data)


def _read(archive: zipfile.ZipFile) -> StoredTensor:
    entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}

    def record(name: str, most: int) -> bytes:
        entry = entries.get(name)
        if entry is None:
            raise TensorUnreadable(f"the file has no record {name!r}; torch.save writes one")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > most:
            raise TensorUnreadable(f"the record {name!r} is compressed or larger than it may be")
        return archive.read(entry)

    if "byteorder" in entries and record("byteorder", 16) != b"little":
        raise TensorUnreadable("its numbers are not little endian")
    layout = _layout(record("data.pkl", _MOST_PICKLE))
    if layout.storage.name not in _DTYPES:
        raise TensorUnreadable(f"it has the type {layout.storage.name}; there are {', '.join(_DTYPES)}")
    dtype, width = _DTYPES[layout.storage.name]
    contiguous = tuple(math.prod(layout.shape[n + 1 :]) for n in range(len(layout.shape)))
    if any(size > 1 and ours != theirs for size, ours, theirs in zip(layout.shape, contiguous, layout.strides, strict=True)):
        raise TensorUnreadable("the tensor is not contiguous: save tensor.contiguous()")
    name = f"data/{layout.storage.record}"
    data = memoryview(record(name, entries[name].compress_size if name in entries else 0))
    begin, end = layout.offset * width, (layout.offset + math.prod(layout.shape)) * width
    if end > len(data):
        raise TensorUnreadable(f"the shape {list(layout.shape)} is larger than the numbers that are there")
    return StoredTensor(dtype, layout.shape, data[begin:end])


def _layout(pickled: bytes) -> _Layout:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(pickled):
        name = opcode.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            break
        try:
            _step(name, argument, stack, memo)
        except (IndexError, KeyError, TypeError, ValueError, AttributeError):
            raise TensorUnreadable("it is not one plain tensor") from None
    if len(stack) != 1 or not isinstance(stack[0], _Layout):
        raise TensorUnreadable("it is not one plain tensor")
    return stack[0]


def _step(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    match name:
        case "GLOBAL":
            stack.append(_Global(argument))
        case "BINUNICODE" | "SHORT_BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
            stack.append(argument)
        case "NEWTRUE" | "NEWFALSE":
            stack.append(name == "NEWTRUE")
        case "MARK":
            stack.append(_MARK)
        case "EMPTY_TUPLE":
            stack.append(())
        case "TUPLE":
            start = max(n for n, value in enumerate(stack) if value is _MARK)
            stack[start:] = [tuple(stack[start + 1 :])]
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            count = int(name[-1])
            if len(stack) < count:
                raise IndexError
            stack[-count:] = [tuple(stack[-count:])]
        case "BINPUT" | "LONG_BINPUT":
            memo[argument] = stack[-1]
        case "BINGET" | "LONG_BINGET":
            stack.append(memo[argument])
        case "BINPERSID":
            kind, storage, key, _, _ = stack.pop()
            if kind != "storage" or not storage.name.startswith("torch ") or not str(key).isdecimal():
                raise ValueError
            stack.append(_Storage(storage.name.removeprefix("torch "), key))
        case "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(_reduced(function, arguments))
        case _:
            raise ValueError(name)


def _reduced(function: Any, arguments: tuple[Any, ...]) -> Any:
    """Return the result of one of the two calls in a tensor's pickle: an empty dictionary of hooks, and the tensor."""
    if function == _Global("collections OrderedDict") and arguments == ():
        return ()
    if function != _Global(_REBUILD):
        raise TensorUnreadable(f"it is not one plain tensor but calls {getattr(function, 'name', '')!r}")
    storage, offset, shape, strides = arguments[:4]
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, _Storage) or len(shape) != len(strides) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError
    return _Layout(storage, offset, shape, strides)
