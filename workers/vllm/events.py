"""Translates vLLM's KV events from its wire format.

vLLM publishes one batch per scheduler step over ZeroMQ: topic, sequence number (8 bytes, big endian, from 0 at its start) and
msgpack `[time, [event, …], rank]`, an event being a map with its class name under `type`.  Unknown fields are ignored; a batch
that cannot be read leaves us knowing nothing, and says so.

`extra_keys` has, per block and in this order: the adapter's name, a pair (identifier, offset) for every media item in the
block, the cache salt (in the first block of a sequence only) and digests of prompt embeddings.

Events of the tiers below the device have no `extra_keys`, and no tokens unless an operator asks vLLM for them
(`self_describing_kv_events`): a block with a salt would look like the same one without. So their content is never used; it is
known from the device, where every block is first or comes to when it is used again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from headrace.workers.engine import KvEvent, Tier
from headrace.workers.kv.feed import BatchReader, tier_of
from headrace.workers.kv.zmq_listener import AllBlocksCleared, KvPayload, RankListeners, ZmqKvListener
from headrace.workers.vllm.settings import public_name

TIER_OF: dict[str, Tier] = {
    "GPU": "device",  # a CPU engine's own memory too
    "CPU": "host",
    "cpu": "host",  # so the connectors of other projects
    "STORAGE": "disk",
}
_U64 = (1 << 64) - 1

Hash = int | bytes


class BlockStored(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored"):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_name: str | None = None
    medium: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


Event = BlockStored | BlockRemoved | AllBlocksCleared


def _event(event: Event) -> KvEvent:
    if isinstance(event, AllBlocksCleared):
        return KvEvent(kind="cleared")
    tier = tier_of(event.medium, TIER_OF)
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
        token_ids=event.token_ids if readable and tier == "device" else (),
        adapter=public_name(event.lora_name),
        salt=salt,
        media=media,
        group=event.group_idx,
        block_size=event.block_size or None,
    )


read_batch = BatchReader("vllm", msgspec.msgpack.Decoder(KvPayload[Event]), _event).read


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
    """Return the 64-bit digest of a media item from its identifier: the first 16 of 16 or 48 hex digits, or the hash of any
    other text.
    """
    if len(identifier) in (16, 48):
        try:
            return int(identifier, 16) >> 4 * (len(identifier) - 16)
        except ValueError:
            pass
    digest: int = xxhash.xxh3_64_intdigest(identifier.encode())
    return digest


class KvListener(RankListeners):
    """Listens to vLLM's KV events. Create it before vLLM starts, with `config()`."""

    def __init__(self, folder: Path, *, ranks: int = 1, first: int = 0) -> None:
        """`first`: the number of this engine's first rank among those of other engines, from which vLLM counts its ports."""
        super().__init__(folder, engine="vLLM", read_batch=read_batch, ranks=first + ranks)
        self._first = first

    def __getitem__(self, rank: int) -> ZmqKvListener:
        return super().__getitem__(self._first + rank)

    def config(self) -> dict[str, Any]:
        return {"enable_kv_cache_events": True, **super().config()}
