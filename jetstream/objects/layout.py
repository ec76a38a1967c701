"""Defines how an object store lays out its objects in a stream: subjects, descriptions, and the index of an object's chunks
(ADR-20, plus two additions that other clients pass over).

An object is a number of chunk messages under one subject, and a description under another that is written after them.  The
description of an object with several chunks has an index of their stream sequences in its metadata, so that a range is read
without what lies before it.  Each chunk has a header with the object's name, so that a sweep can look for the description.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from headrace.jetstream.ports import StoredObject

CHUNK = 128 * 1024
NAME_HEADER = "Headrace-Object"
INDEX = "headrace-index"  # the key of the metadata

_DIGEST = "SHA-256="


class _Options(msgspec.Struct, omit_defaults=True):
    max_chunk_size: int = CHUNK


class ObjectInfo(msgspec.Struct, omit_defaults=True):
    """The stored description of an object (ADR-20)."""

    name: str
    bucket: str
    nuid: str
    size: int = 0
    chunks: int = 0
    mtime: str = ""
    digest: str = ""
    deleted: bool = False
    metadata: dict[str, str] = {}
    options: _Options = msgspec.field(default_factory=_Options)

    def sequences(self) -> list[int]:
        """Return the stream sequences of the chunks, in order; none where the description has no index."""
        text = self.metadata.get(INDEX)
        return decode_index(text) if text else []

    def sha256(self) -> bytes | None:
        """Return the digest of the content, None if the description has none."""
        _, _, stored = self.digest.partition("=")
        return base64.urlsafe_b64decode(stored + "=" * (-len(stored) % 4)) if stored else None

    def public(self) -> StoredObject:
        """Return what users of the store see of the description."""
        return StoredObject(
            name=self.name,
            size=self.size,
            digest=(self.sha256() or b"").hex(),
            stored=datetime.fromisoformat(self.mtime).timestamp() if self.mtime else 0.0,
            metadata={key: value for key, value in self.metadata.items() if key != INDEX},
        )


class ObjectSubjects:
    """The subjects of one object store."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self.stream = f"OBJ_{bucket}"
        self.all_chunks = f"$O.{bucket}.C.*"
        self.all_descriptions = f"$O.{bucket}.M.*"

    def chunks(self, nuid: str) -> str:
        return f"$O.{self.bucket}.C.{nuid}"

    def description(self, name: str) -> str:
        return f"$O.{self.bucket}.M.{encode_name(name)}"


def encode_name(name: str) -> str:
    """Return the name of an object as a token of a subject, and as the value of a header."""
    return base64.urlsafe_b64encode(name.encode()).decode()


def decode_name(token: str) -> str:
    """Return the name that `encode_name` made a token of. Raises ValueError."""
    return base64.urlsafe_b64decode(token).decode()


def encode_digest(digest: bytes) -> str:
    """Return a digest as descriptions hold it."""
    return _DIGEST + base64.urlsafe_b64encode(digest).decode()


def encode_index(sequences: Sequence[int]) -> str:
    """Return stream sequences as text: compressed differences, a few bytes for chunks that lie side by side."""
    raw = bytearray()
    last = 0
    for sequence in sequences:
        step = sequence - last
        last = sequence
        number = step << 1 if step >= 0 else (-step << 1) - 1
        while number >= 0x80:
            raw.append(number & 0x7F | 0x80)
            number >>= 7
        raw.append(number)
    return base64.b64encode(zlib.compress(bytes(raw), 9)).decode()


def decode_index(text: str) -> list[int]:
    """Return the sequences that `encode_index` was given. Raises ValueError if the text is none of its."""
    try:
        raw = zlib.decompress(base64.b64decode(text, validate=True))
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"an index of chunks cannot be read: {error}") from None
    sequences: list[int] = []
    last = number = shift = 0
    for byte in raw:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            last += number >> 1 if not number & 1 else -((number + 1) >> 1)
            sequences.append(last)
            number = shift = 0
    if shift:
        raise ValueError("an index of chunks ends in the middle of a number")
    return sequences


def stored_now() -> str:
    """Return the time of a description that is written now."""
    return datetime.now(UTC).isoformat()
