"""The form in which a block lies in a tier that outlives its engine: a checksum over its name and bytes, then the bytes.

Record: `HRKV`, version (u8), 3 zero bytes, length of the bytes (u64 little endian), xxh3-128 of the name, a zero byte and the
bytes (16 bytes), the bytes. The name is in the checksum so that a block cannot be taken for another one, wherever a store has
put it.
"""

from __future__ import annotations

import struct

import xxhash

_HEAD = struct.Struct("<4sB3xQ16s")
_MAGIC = b"HRKV"
_VERSION = 1

Bytes = bytes | bytearray | memoryview


class DamagedBlock(Exception):
    """A record is not that of the block that was asked for, or not as it was written."""


def seal(name: str, data: Bytes) -> bytes:
    """Return the record of a block."""
    return b"".join((_HEAD.pack(_MAGIC, _VERSION, len(data), _checksum(name, data)), data))


def unseal(name: str, record: Bytes, *, size: int) -> memoryview:
    """Return the bytes of a block from its record. Raises DamagedBlock unless it is this block, whole, and of this size."""
    if len(record) < _HEAD.size:
        raise DamagedBlock(f"block {name}: a record of {len(record)} bytes has no head")
    magic, version, length, checksum = _HEAD.unpack_from(record)
    if (magic, version) != (_MAGIC, _VERSION):
        raise DamagedBlock(f"block {name}: the record begins with {magic!r}, version {version}")
    data = memoryview(record)[_HEAD.size :]
    if not length == len(data) == size:
        raise DamagedBlock(f"block {name}: {len(data)} bytes, of {length} that were written and {size} that were expected")
    if checksum != _checksum(name, data):
        raise DamagedBlock(f"block {name}: the checksum does not fit")
    return data


def _checksum(name: str, data: Bytes) -> bytes:
    digest = xxhash.xxh3_128(name.encode())
    digest.update(b"\0")
    digest.update(data)
    return digest.digest()
