"""A cache of blocks on the device and in host memory, which announces its changes in the shapes of TensorRT-LLM's KV events."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from tensorrt_llm.version import IS_1_3

DEVICE, HOST = 0, 1


@dataclass(slots=True)
class Block:
    hash: int
    parent: int | None
    tokens: tuple[int, ...]
    level: int = DEVICE
    holders: int = 0
    namespace: tuple[Any, ...] = ()
    children: set[int] = field(default_factory=set)


class BlockCache:
    """The blocks of one attention data-parallel rank."""

    def __init__(self, blocks: int, host_blocks: int, size: int, *, window: int, rank: int | None) -> None:
        self.size = size
        self.capacity = blocks
        self._host_capacity = host_blocks
        self._window = window
        self._rank = rank
        self._blocks: OrderedDict[int, Block] = OrderedDict()  # least recently used first
        self._next_event = 0
        self.private = 0  # blocks of running requests that are not full yet
        self.events: list[dict[str, Any]] = []
        self._announce({"type": "created", "num_blocks_per_cache_level": [blocks, host_blocks]})

    @property
    def on_device(self) -> int:
        return sum(block.level == DEVICE for block in self._blocks.values())

    @property
    def used(self) -> int:
        return self.private + sum(block.holders > 0 for block in self._blocks.values())

    def take_events(self) -> list[dict[str, Any]]:
        events, self.events = self.events, []
        return events

    def skip_events(self, count: int) -> None:
        """Leave numbers out, as an engine does whose buffer was full."""
        self._next_event += count

    def _announce(self, data: dict[str, Any]) -> None:
        event: dict[str, Any] = {"event_id": self._next_event, "data": data, "window_size": self._window}
        if IS_1_3:
            event |= {"layer_group_id": 0, "hash_algo": "v1"}
        if self._rank is not None:
            event["attention_dp_rank"] = self._rank
        self._next_event += 1
        self.events.append(event)

    def chain(self, tokens: list[int], namespace: tuple[Any, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the hash and the tokens of each full block."""
        parent = repr(namespace).encode()
        for start in range(0, len(tokens) - self.size + 1, self.size):
            part = tuple(tokens[start : start + self.size])
            parent = blake2b(parent + repr(part).encode(), digest_size=8).digest()
            yield int.from_bytes(parent, "little"), part

    def hold_prefix(self, tokens: list[int], namespace: tuple[Any, ...]) -> list[int]:
        """Hold the cached blocks at the beginning of a prompt, at most all but its last token."""
        held: list[int] = []
        for name, _ in self.chain(tokens[:-1], namespace):
            block = self._blocks.get(name)
            if block is None:
                break
            if block.level == HOST:
                self._move(block, DEVICE)
            block.holders += 1
            self._blocks.move_to_end(name)
            held.append(name)
        return held

    def store(self, tokens: list[int], namespace: tuple[Any, ...], held: list[int], *, final: bool) -> list[int]:
        """Keep the full blocks of a sequence, and with `final` announce its last, partial one. Returns what it holds now."""
        now: list[int] = []
        fresh: list[Block] = []
        parent: int | None = None
        for name, part in self.chain(tokens, namespace):
            block = self._blocks.get(name)
            if block is None:
                self._make_room()
                block = Block(name, parent, part, namespace=namespace)
                self._blocks[name] = block
                fresh.append(block)
            if name not in held:
                block.holders += 1
            self._blocks.move_to_end(name)
            now.append(name)
            parent = name
        rest = tuple(tokens[len(now) * self.size :])
        if fresh:
            self._announce_stored(fresh, ())
        if final and rest:
            self._announce_partial(parent, rest, namespace)
        return now

    def release(self, held: list[int]) -> None:
        for name in held:
            if (block := self._blocks.get(name)) is not None:
                block.holders -= 1

    def _make_room(self) -> None:
        while self.on_device >= self.capacity:
            victim = next(iter(self._idle()), None)
            if victim is None:
                return
            if self._host_capacity:
                self._move(victim, HOST)
                while sum(one.level == HOST for one in self._blocks.values()) > self._host_capacity:
                    self._drop(next(one for one in self._blocks.values() if one.level == HOST))
            else:
                self._drop(victim)

    def _idle(self) -> list[Block]:
        """Blocks on the device that no request holds, those without children there first, the oldest before others."""
        idle = [one for one in self._blocks.values() if one.level == DEVICE and not one.holders]
        parents = {one.parent for one in self._blocks.values() if one.level == DEVICE}
        return sorted(idle, key=lambda one: one.hash in parents)

    def _move(self, block: Block, level: int) -> None:
        if level == DEVICE:
            self._make_room()
        before, block.level = block.level, level
        self._announce(
            {
                "type": "updated",
                "block_hash": block.hash,
                "cache_level": {"type": "event_diff", "new_value": level, "old_value": before},
                "priority": None if IS_1_3 else {"type": "event_diff", "new_value": 35, "old_value": 35},
            }
        )

    def _drop(self, block: Block) -> None:
        del self._blocks[block.hash]
        self._announce({"type": "removed", "block_hashes": [block.hash]})

    def _announce_stored(self, blocks: list[Block], _: tuple[int, ...]) -> None:
        first = blocks[0]
        self._announce(
            {
                "type": "stored",
                "parent_hash": first.parent,
                "blocks": [self._described(one.hash, one.tokens, one.namespace) for one in blocks],
            }
        )

    def _announce_partial(self, parent: int | None, tokens: tuple[int, ...], namespace: tuple[Any, ...]) -> None:
        name = int.from_bytes(blake2b(repr((parent, tokens, namespace)).encode(), digest_size=8).digest(), "little")
        self._announce({"type": "stored", "parent_hash": parent, "blocks": [self._described(name, tokens, namespace)]})
        self._announce({"type": "removed", "block_hashes": [name]})

    def _described(self, name: int, tokens: tuple[int, ...], namespace: tuple[Any, ...]) -> dict[str, Any]:
        lora, salt = namespace
        described: dict[str, Any] = {
            "type": "stored_block",
            "block_hash": name,
            "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens],
            "cache_level": DEVICE,
            "priority": 35,
        }
        if IS_1_3:
            described["cache_salt"] = salt
            described["mm_keys"] = []
            if lora is not None:
                described["lora_id"] = lora
        return described
