"""Names the embeddings of a media item by what they depend on, and orders the encode workers that may compute them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from headrace.broker.codec import encode


def object_name(encoder: str, salt: str | None, kind: str, data: bytes) -> str:
    """Return the name of an item's embeddings: equal for equal bytes, encoders and salts, and for nothing else.

    With the salt in it a tenant cannot find out by the time of an answer what another one has sent.
    """
    return hashlib.sha256(encode([encoder, salt, kind, hashlib.sha256(data).digest()])).hexdigest()


def in_order(name: str, workers: Iterable[str]) -> list[str]:
    """Return the workers, best first: the same one for the same item while it lives, and each one for its share of items."""
    return sorted(workers, key=lambda worker: hashlib.sha256(f"{name} {worker}".encode()).digest())
