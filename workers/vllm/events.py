"""Translates vLLM's KV events from its wire format.

vLLM publishes one batch per scheduler step over ZeroMQ: topic, sequence number (8 bytes, big endian, from 0 at its start) and
msgpack `[time, [event, …], rank]`, an event being a map with its class name under `type`.  Unknown fields are ignored; a batch
that cannot be read leaves us knowing nothing, and says so.

`extra_keys` has, per block and in this order: the adapter's name, a pair (identifier, offset) for every media item in the
block, the cache salt (in the first block of a sequence only) and digests of prompt embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import structlog
import xxhash

from headrace.workers import metrics
from headrace.workers.engine import KvBatch, KvEvent, Tier
from headrace.workers.vllm.adapters import public_name

log = structlog.get_logger()

TIER_OF: dict[str, Tier] = {"GPU": "device", "CPU": "host", "STORAGE": "disk"}  # a CPU engine's own memory is "GPU" too
_U64 = (1 << 64) - 1

Hash = int | bytes


class BlockStored(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored"):
    """Consecutive blocks of one group were stored in the cache."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_name: str | None = None
    medium: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved"):
    """Blocks were removed from the cache."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    """The cache was cleared."""


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    rank: int | None = None


_decoder = msgspec.msgpack.Decoder(_Batch)


def read_batch(number: int, payload: bytes) -> KvBatch:
    """Read the events of a step. An unreadable batch becomes `cleared`, because the known state is unreliable after it."""
    try:
        return KvBatch((_event(event) for event in _decoder.decode(payload).events), number)
    except (msgspec.DecodeError, ValueError) as error:
        metrics.KV_TROUBLE.labels("malformed").inc()
        log.error("kv.malformed", engine="vllm", number=number, error=str(error))
        return KvBatch([KvEvent(kind="cleared")], number, partial=True)


def _event(event: BlockStored | BlockRemoved | AllBlocksCleared) -> KvEvent:
    if isinstance(event, AllBlocksCleared):
        return KvEvent(kind="cleared")
    tier = _tier(event.medium)
    hashes = [_number(hash_) for hash_ in event.block_hashes]
    if isinstance(event, BlockRemoved):
        return KvEvent(kind="removed", tier=tier, hashes=hashes, group=event.group_idx)
    keys = event.extra_keys or []
    salt, media, readable = _extra(keys, event.lora_name, first=event.parent_block_hash is None)
    return KvEvent(
        kind="stored",
        tier=tier,
        hashes=hashes,
        parent=None if event.parent_block_hash is None else _number(event.parent_block_hash),
        token_ids=event.token_ids if readable else (),
        adapter=public_name(event.lora_name),
        salt=salt,
        media=media,
        group=event.group_idx,
        block_size=event.block_size or None,
    )


def _tier(medium: str | None) -> Tier:
    if medium is None:
        return "device"
    tier = TIER_OF.get(medium)
    if tier is None:
        raise ValueError(f"medium {medium!r} is unknown; known: {', '.join(TIER_OF)}")
    return tier


def _number(hash_: Hash) -> int:
    """Return the low 64 bits of a digest, as vLLM itself shortens it."""
    return (hash_ if isinstance(hash_, int) else int.from_bytes(hash_, "big")) & _U64


def _extra(
    keys: list[list[Any] | None], adapter: str | None, *, first: bool
) -> tuple[str | None, list[tuple[tuple[int, int], ...]], bool]:
    """Return (salt, media per block, whether the token ids give the whole content of the blocks)."""
    salt: str | None = None
    media: list[tuple[tuple[int, int], ...]] = []
    readable = True
    for number, of_block in enumerate(keys):
        rest = list(of_block or ())
        if adapter is not None and rest and rest[0] == adapter:
            rest.pop(0)
        items = tuple(_items(rest))
        media.append(items)
        for key in rest:
            if isinstance(key, str) and first and number == 0:
                salt = key
            elif not isinstance(key, list | tuple):
                readable = False  # The block has embeddings in place of tokens, so no prompt of ids can have it.
    return salt, media if any(media) else [], readable


def _items(keys: list[Any]) -> Iterator[tuple[int, int]]:
    for key in keys:
        if isinstance(key, list | tuple):
            identifier, offset = key
            yield media_digest(str(identifier)), max(0, int(offset))


def media_digest(identifier: str) -> int:
    """Return the 64-bit digest of a media item from its identifier: 16 hex digits, or the hash of any other text."""
    if len(identifier) == 16:
        try:
            return int(identifier, 16)
        except ValueError:
            pass
    digest: int = xxhash.xxh3_64_intdigest(identifier.encode())
    return digest
