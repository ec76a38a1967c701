"""Translates SGLang's KV events from its wire format.

SGLang publishes one batch per scheduler step over ZeroMQ, framed as vLLM does it; the payload is msgpack
`[time, [event, …], rank]`, an event being a map with its class name under `type`. Hashes are signed. Only in the format
"dynamo" do they differ between salts and adapters with the same tokens, and only then does an event name its adapter; that
format is the one that `kv_listener` asks for. Unknown fields are ignored.
"""

from __future__ import annotations

import msgspec

from headrace.workers.engine import KvEvent, Tier
from headrace.workers.kv.event_batches import BatchReader, tier_of

TIER_OF: dict[str, Tier] = {"GPU": "device", "CPU_PINNED": "host", "DISK": "disk", "EXTERNAL": "disk"}
"""SGLang's mediums: "GPU" is also a CPU engine's own memory, and a pool outside of the machine counts as the slowest tier."""

_U64 = (1 << 64) - 1


class BlockStored(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored"):
    """Consecutive pages were stored in the cache."""

    block_hashes: list[int]
    parent_block_hash: int | None = None
    token_ids: list[int | tuple[int, int]] = []  # pairs with a draft model that reads the next token, too
    block_size: int = 0
    medium: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved"):
    """Pages were removed from the cache."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    """The cache was cleared."""


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    rank: int | None = None


def _event(event: BlockStored | BlockRemoved | AllBlocksCleared) -> KvEvent:
    if isinstance(event, AllBlocksCleared):
        return KvEvent(kind="cleared")
    tier = tier_of(event.medium, TIER_OF)
    hashes = [hash_ & _U64 for hash_ in event.block_hashes]
    if isinstance(event, BlockRemoved):
        return KvEvent(kind="removed", tier=tier, hashes=hashes)
    return KvEvent(
        kind="stored",
        tier=tier,
        hashes=hashes,
        parent=None if event.parent_block_hash is None else event.parent_block_hash & _U64,
        token_ids=[token if isinstance(token, int) else token[0] for token in event.token_ids],
        adapter=event.lora_name,
        salt=event.cache_salt,
        block_size=event.block_size or None,
    )


read_batch = BatchReader("sglang", msgspec.msgpack.Decoder(_Batch), _event).read
