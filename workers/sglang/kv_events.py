"""Translates SGLang's KV events from its wire format.

SGLang publishes one batch per scheduler step over ZeroMQ, framed as vLLM does it; the payload is msgpack
`[time, [event, …], rank]`, an event being a map with its class name under `type`. Hashes are signed. Only in the format
"dynamo" do they differ between salts and adapters with the same tokens, and only then does an event name its adapter; that
format is the one that `kv_listener` asks for. Unknown fields are ignored.
"""

from __future__ import annotations

import msgspec
import structlog

from headrace.workers import metrics
from headrace.workers.engine import KvBatch, KvEvent, Tier

log = structlog.get_logger()

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


_decoder = msgspec.msgpack.Decoder(_Batch)


def read_batch(number: int, payload: bytes) -> KvBatch:
    """Read the events of a step. An unreadable batch becomes `cleared`, because the known state is unreliable after it."""
    try:
        return KvBatch((_event(event) for event in _decoder.decode(payload).events), number)
    except (msgspec.DecodeError, ValueError) as error:
        metrics.KV_TROUBLE.labels("malformed").inc()
        log.error("kv.malformed", engine="sglang", number=number, error=str(error))
        return KvBatch([KvEvent(kind="cleared")], number, partial=True)


def _event(event: BlockStored | BlockRemoved | AllBlocksCleared) -> KvEvent:
    if isinstance(event, AllBlocksCleared):
        return KvEvent(kind="cleared")
    tier = _tier(event.medium)
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


def _tier(medium: str | None) -> Tier:
    if medium is None:
        return "device"
    tier = TIER_OF.get(medium)
    if tier is None:
        raise ValueError(f"medium {medium!r} is unknown; known: {', '.join(TIER_OF)}")
    return tier
