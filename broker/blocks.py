"""Computes block identity: the hash chain that names a prompt's KV blocks on every machine and in every language.

    chain[-1] = 0, or xxh3_64(msgpack [adapter, salt]) when either is set
    chain[i]  = xxh3_64(tokens of block i as little-endian u32, seed = chain[i-1])

A multimodal item that touches a block appends to the hashed bytes its digest (8 bytes, little endian) and the offset of the
item's first token in this block, counted from the block's start (u32, little endian; an item that began in an earlier block
has offset 0).  Only whole blocks have a value.  Because each value depends on all tokens before it, a prefix index needs only
a table from value to workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import xxhash

from headrace.broker.codec import encode, pack_u32

_hash = xxhash.xxh3_64_intdigest


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """A media item in a prompt: tokens `start` to `start + length` stand for the item with this 64-bit content digest."""

    start: int
    length: int
    digest: int


@lru_cache(maxsize=1024)
def chain_seed(adapter: str | None = None, salt: str | None = None) -> int:
    """Return chain[-1]: 0 for plain prompts, so that adapters and salts never share blocks with them."""
    if adapter is None and salt is None:
        return 0
    return _hash(encode([adapter, salt]))


def block_chain(
    token_ids: Sequence[int] | bytes,
    block_size: int,
    *,
    adapter: str | None = None,
    salt: str | None = None,
    media: Sequence[MediaSpan] = (),
) -> list[int]:
    """Return one u64 per whole block of `token_ids` (ids, or already packed little-endian u32).

    Raises ValueError for a block size below 1.
    """
    if block_size < 1:
        raise ValueError(f"block size must be at least 1, got {block_size}")
    packed = token_ids if isinstance(token_ids, bytes) else pack_u32(token_ids)
    width = block_size * 4
    value = chain_seed(adapter, salt)
    chain: list[int] = []
    for end in range(width, len(packed) + 1, width):
        data = packed[end - width : end]
        if media:
            data += _media_bytes(media, (end - width) // 4, block_size)
        value = _hash(data, seed=value)
        chain.append(value)
    return chain


def extend_chain(parent: int, tokens: Sequence[int]) -> int:
    """Return the value of the block that holds `tokens` after the block with value `parent`."""
    return _hash(pack_u32(tokens), seed=parent)


def extend_chain_packed(parent: int, packed: bytes, media: Sequence[tuple[int, int]] = ()) -> int:
    """Do the same as `extend_chain` for packed ids.

    `media` has the (digest, offset) of each media item that touches the block, in order.
    """
    for digest, offset in media:
        packed += digest.to_bytes(8, "little") + offset.to_bytes(4, "little")
    return _hash(packed, seed=parent)


def _media_bytes(media: Sequence[MediaSpan], start: int, block_size: int) -> bytes:
    mixed = b""
    for item in media:
        if item.start < start + block_size and item.start + item.length > start:
            offset = max(0, item.start - start)
            mixed += item.digest.to_bytes(8, "little") + offset.to_bytes(4, "little")
    return mixed
