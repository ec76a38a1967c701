"""The form in which embeddings lie in the object store: a checksum over their name and bytes, then the bytes.

Record: `HRME`, version (u8), 3 zero bytes, xxh3-128 of name, a zero byte and bytes (16 bytes), the bytes, whose form is the
engine's. The name is in the checksum so that the embeddings of one item cannot be taken for those of another.
"""

from __future__ import annotations

import struct

import xxhash

_HEAD = struct.Struct("<4sB3x16s")
_MAGIC = b"HRME"
_VERSION = 1


class DamagedEmbeddings(Exception):
    """A record is not that of the embeddings that were asked for, or not as it was written."""


def seal(name: str, data: bytes) -> bytes:
    """Return the record of embeddings."""
    return b"".join((_HEAD.pack(_MAGIC, _VERSION, _checksum(name, data)), data))


def unseal(name: str, record: bytes) -> bytes:
    """Return the embeddings of a record. Raises DamagedEmbeddings unless it is theirs, and whole."""
    if len(record) < _HEAD.size:
        raise DamagedEmbeddings(f"embeddings {name}: a record of {len(record)} bytes has no head")
    magic, version, checksum = _HEAD.unpack_from(record)
    if (magic, version) != (_MAGIC, _VERSION):
        raise DamagedEmbeddings(f"embeddings {name}: the record begins with {magic!r}, version {version}")
    data = record[_HEAD.size :]
    if checksum != _checksum(name, data):
        raise DamagedEmbeddings(f"embeddings {name}: the checksum does not fit")
    return data


def _checksum(name: str, data: bytes) -> bytes:
    digest = xxhash.xxh3_128(name.encode())
    digest.update(b"\0")
    digest.update(data)
    return digest.digest()
