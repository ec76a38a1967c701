"""The form in which the embeddings of a media item leave an engine: a head that says what they are, then the numbers.

Record: `HREM`, version (u8), length of the name of the type of the numbers (u8), 2 zero bytes, rows and width (u32 little
endian), the name, the numbers row by row as the engine's memory has them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_HEAD = struct.Struct("<4sBBxxII")
_MAGIC = b"HREM"
_VERSION = 1
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

MOST_BYTES = 256 << 20
"""The most bytes of one item that are taken; 16,000 rows of 8,192 numbers of 16 bits."""

Bytes = bytes | bytearray | memoryview


class UnusableEmbeddings(Exception):
    """Bytes are not the embeddings of an item."""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A row of `width` numbers of the type `dtype` for each token of an item."""

    rows: int
    width: int
    dtype: str
    data: Bytes


def pack(embeddings: Embeddings) -> bytes:
    """Return the record. Raises UnusableEmbeddings for a type of numbers that no record has, or a wrong number of bytes."""
    _check(embeddings)
    name = embeddings.dtype.encode()
    head = _HEAD.pack(_MAGIC, _VERSION, len(name), embeddings.rows, embeddings.width)
    return b"".join((head, name, embeddings.data))


def unpack(record: Bytes) -> Embeddings:
    """Return the embeddings of a record. Raises UnusableEmbeddings."""
    view = memoryview(record)
    if len(view) < _HEAD.size:
        raise UnusableEmbeddings(f"a record of {len(view)} bytes has no head")
    magic, version, length, rows, width = _HEAD.unpack_from(view)
    if (magic, version) != (_MAGIC, _VERSION):
        raise UnusableEmbeddings(f"the record begins with {magic!r}, version {version}")
    begin = _HEAD.size + length
    embeddings = Embeddings(rows, width, bytes(view[_HEAD.size : begin]).decode("latin-1"), view[begin:])
    _check(embeddings)
    return embeddings


def _check(embeddings: Embeddings) -> None:
    size = _ITEM_BYTES.get(embeddings.dtype)
    if size is None:
        raise UnusableEmbeddings(f"numbers of the type {embeddings.dtype!r}; known: {', '.join(_ITEM_BYTES)}")
    wanted = embeddings.rows * embeddings.width * size
    if not 0 < wanted <= MOST_BYTES or len(embeddings.data) != wanted:
        raise UnusableEmbeddings(
            f"{len(embeddings.data)} bytes for {embeddings.rows} rows of {embeddings.width} numbers, of 1 to {MOST_BYTES}"
        )
