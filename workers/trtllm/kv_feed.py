"""Hands the polled KV events on to one reader per rank, in numbered batches, and keeps the last ones for a replay."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from headrace.workers import metrics
from headrace.workers.engine import KvBatch, KvEvent, Tier

# Translates TensorRT-LLM's KV events and keeps what its cache holds, because an engine that is polled cannot be asked again.
#
# An event is `{"event_id", "window_size", "attention_dp_rank"?, "data"}`; 1.3 adds `layer_group_id` and `hash_algo`. `data`
# is one of `created` (blocks per cache level), `stored` (a parent and consecutive blocks), `removed` (hashes) and `updated`
# (a block changed its cache level or its priority). Blocks of 1.3 also have `cache_salt`, `lora_id` and `mm_keys`. Hashes are
# integers, or hexadecimal text with some algorithms of 1.3.
#
# Each attention data-parallel rank numbers its events from 0. A gap means that events were lost, and then nothing is certain
# of that rank. Event 0 again means that the engine's cache was made anew. Sliding windows announce their blocks in events of
# their own; only those of the largest window count. A partial block (fewer tokens than a block has) is never announced to
# routers.

_log = structlog.get_logger()

TIER_OF_LEVEL: Mapping[int, Tier] = {0: "device", 1: "host", 2: "disk"}
_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Block:
    hash: int
    parent: int | None
    token_ids: tuple[int, ...]  # empty: no prompt of plain ids can have this block
    tier: Tier
    adapter: str | None = None
    salt: str | None = None
    media: tuple[tuple[int, int], ...] = ()

    def stored(self) -> KvEvent:
        return KvEvent(
            kind="stored",
            tier=self.tier,
            hashes=(self.hash,),
            parent=self.parent,
            token_ids=self.token_ids,
            adapter=self.adapter,
            salt=self.salt,
            media=(self.media,) if self.media else (),
        )


@dataclass(slots=True)
class Changes:
    """The changes that a poll has brought. After a loss the first event is `cleared`."""

    events: list[KvEvent] = field(default_factory=list)


class CacheLedger:
    """Everything that the cache of one rank is known to hold, parents before their children."""

    def __init__(self, block_size: int, adapters: Mapping[int, str] | None = None, *, rank: int | None = None) -> None:
        """`adapters`: the names by the engine's numbers. `rank` None: the engine has one, which its events need not name."""
        self._block_size = block_size
        self._adapters = adapters if adapters is not None else {}
        self._rank = rank
        self._next_id = 0
        self._window: int | None = None  # the largest
        self._blocks: dict[int, Block] = {}
        self._partial_blocks: set[int] = set()
        self.partial = False  # events were lost, so that the cache may hold more than is known
        self.levels: tuple[int, ...] = ()  # blocks per cache level, as the engine has told

    def apply(self, events: Iterable[Mapping[str, Any]]) -> Changes:
        """Apply events in the order in which they were polled. Those that cannot be read count as lost."""
        changes = Changes()
        for event in events:
            try:
                self._apply(event, changes)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                metrics.KV_TROUBLE.labels("malformed").inc()
                _log.error("kv.malformed", engine="trtllm", error=repr(error))
                self._forget(changes, lost=True)
        return changes

    def inventory(self) -> list[KvEvent]:
        """Return `stored` events for all that is cached, parents before their children."""
        return [block.stored() for block in self._blocks.values()]

    def _apply(self, event: Mapping[str, Any], changes: Changes) -> None:
        if self._rank is not None and event.get("attention_dp_rank", 0) != self._rank:
            raise ValueError(f"an event of the rank {event.get('attention_dp_rank')!r}, which the engine does not have")
        number, data = int(event["event_id"]), event["data"]
        kind = data["type"]
        if number != self._next_id:
            if number == 0 and kind == "created":
                _log.warning("kv.cache_made_anew", engine="trtllm", after=self._next_id)
                self._window = None
                self._forget(changes, lost=False)
            else:
                metrics.KV_TROUBLE.labels("gap").inc()
                _log.warning("kv.events_lost", engine="trtllm", expected=self._next_id, got=number)
                self._forget(changes, lost=True)
        self._next_id = number + 1
        window = event.get("window_size")
        if kind == "created":
            if window is None or self._window is None or window >= self._window:
                self._window = window
                self.levels = tuple(int(count) for count in data["num_blocks_per_cache_level"])
            return
        if window is not None and self._window is not None and window != self._window:
            return
        if kind == "stored":
            changes.events += self._stored(data)
        elif kind == "removed":
            changes.events += self._removed(data["block_hashes"])
        elif kind == "updated":
            changes.events += self._updated(data)
        else:
            raise ValueError(f"an event of the kind {kind!r} is unknown")

    def _forget(self, changes: Changes, *, lost: bool) -> None:
        self._blocks.clear()
        self._partial_blocks.clear()
        self.partial = lost
        changes.events = [KvEvent(kind="cleared")]

    def _stored(self, data: Mapping[str, Any]) -> Iterator[KvEvent]:
        parent = None if data.get("parent_hash") is None else hash_number(data["parent_hash"])
        if parent == 0:  # the root's hash in some versions
            parent = None
        for one in data["blocks"]:
            if one.get("block_hash") is None:
                return
            name = hash_number(one["block_hash"])
            tokens = one["tokens"]
            if len(tokens) > self._block_size:
                raise ValueError(f"a block of {len(tokens)} tokens, and tokens_per_block is {self._block_size}")
            if len(tokens) < self._block_size:
                self._partial_blocks.add(name)
                return
            block = self._block(one, name, parent, data)
            if name not in self._blocks:
                self._blocks[name] = block
                yield block.stored()
            parent = name

    def _block(self, one: Mapping[str, Any], name: int, parent: int | None, data: Mapping[str, Any]) -> Block:
        salt, adapter = one.get("cache_salt"), data.get("lora_name")
        media = tuple((int(str(key["hash"])[:16], 16), int(key.get("start_offset", 0))) for key in one.get("mm_keys") or ())
        number = one.get("lora_id")
        readable = isinstance(salt, str | None)  # some versions tell a number that was made of the salt
        if number is not None and adapter is None:
            adapter = self._adapters.get(int(number))
            readable = readable and adapter is not None
        if not media and any(token.get("token_extra_id") for token in one["tokens"]):
            readable = False  # embeddings in place of tokens
        return Block(
            hash=name,
            parent=parent,
            token_ids=tuple(int(token["token_id"]) for token in one["tokens"]) if readable else (),
            tier=_tier(one.get("cache_level", 0)),
            adapter=adapter,
            salt=salt if isinstance(salt, str) else None,
            media=media,
        )

    def _removed(self, hashes: Iterable[Any]) -> Iterator[KvEvent]:
        for one in hashes:
            name = hash_number(one)
            if name in self._partial_blocks:
                self._partial_blocks.discard(name)
            elif (block := self._blocks.pop(name, None)) is not None:
                yield KvEvent(kind="removed", tier=block.tier, hashes=(name,))

    def _updated(self, data: Mapping[str, Any]) -> Iterator[KvEvent]:
        name, level = hash_number(data["block_hash"]), data.get("cache_level")
        block = self._blocks.get(name)
        if block is None or level is None:  # a partial block, or only its priority has changed
            return
        moved = replace(block, tier=_tier(level["new_value"]))
        if moved.tier != block.tier:
            self._blocks[name] = moved
            yield moved.stored()
            yield KvEvent(kind="removed", tier=block.tier, hashes=(name,))


def hash_number(value: Any) -> int:
    """Return the low 64 bits of a block's hash, which is a number or hexadecimal text."""
    return (int(value, 16) if isinstance(value, str) else int(value)) & _U64


def _tier(level: Any) -> Tier:
    tier = TIER_OF_LEVEL.get(int(level))
    if tier is None:
        raise ValueError(f"cache level {level!r} is unknown; known: {', '.join(map(str, TIER_OF_LEVEL))}")
    return tier


KEPT_BATCHES = 4096


class KvFeed:
    """The batches of one rank, numbered from 0. A reader that falls further behind than is kept begins anew."""

    def __init__(self, ledger: CacheLedger, kept: int = KEPT_BATCHES) -> None:
        self._ledger = ledger
        self._kept: deque[KvBatch] = deque(maxlen=kept)
        self._number = -1  # of the last batch
        self._more = asyncio.Event()

    def put(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Apply the events of one poll and make a batch of them if they change anything."""
        changes = self._ledger.apply(events)
        if not changes.events:
            return
        self._number += 1
        cleared = changes.events[0].kind == "cleared"
        self._kept.append(KvBatch(changes.events, self._number, partial=cleared and self._ledger.partial))
        self._more.set()

    def inventory(self) -> list[KvEvent]:
        return self._ledger.inventory()

    def replay(self, start: int) -> list[KvBatch]:
        """Return the kept batches from number `start` on."""
        return [batch for batch in self._kept if batch.number >= start]

    def _everything(self) -> KvBatch:
        return KvBatch([KvEvent(kind="cleared"), *self._ledger.inventory()], self._number, partial=self._ledger.partial)

    async def read(self) -> AsyncGenerator[KvBatch]:
        """Yield everything that is cached now, and then each batch."""
        seen = self._number
        yield self._everything()
        while True:
            if seen < self._number:
                waiting = self.replay(seen + 1)
                if waiting[0].number != seen + 1:  # the reader fell behind what is kept
                    waiting = [self._everything()]
                for batch in waiting:
                    seen = batch.number
                    yield batch
                continue
            self._more.clear()
            await self._more.wait()


class KvFeeds:
    """The feeds of an engine's attention data-parallel ranks. `adapters`: the names by the engine's numbers."""

    def __init__(self, block_size: int, adapters: Mapping[int, str] | None = None, *, ranks: int = 1) -> None:
        self._feeds = [KvFeed(CacheLedger(block_size, adapters, rank=rank if ranks > 1 else None)) for rank in range(ranks)]

    def __getitem__(self, rank: int) -> KvFeed:
        return self._feeds[rank]

    def put(self, events: Sequence[Any]) -> None:
        """Apply the events of one poll, each to its rank. One that names no rank of the engine makes all ranks uncertain."""
        for rank, feed in enumerate(self._feeds):
            feed.put([event for event in events if self._rank_of(event) in (rank, None)])

    def _rank_of(self, event: Any) -> int | None:
        """Return the rank of an event; None if no rank can be read, which the ledgers then find malformed."""
        if not isinstance(event, Mapping):
            return None
        rank = event.get("attention_dp_rank")
        if rank is None:
            return 0
        return rank if isinstance(rank, int) and rank < len(self._feeds) else None
