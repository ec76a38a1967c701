"""Caches token ids and block hashes of long prompts, so that the next turn of a conversation only costs its new part.

It consists of two LRU caches of exact results, bounded together in bytes:

- the ids of a piece of text that can be tokenised alone (`headrace.frontend.prompts.split_points`), by the tokenizer and
the text itself,
- the block hashes of a run of blocks, by the hash before it and its ids.

Keys are complete, never digests, so no request can get the ids of another text. Losing the cache costs time, never an answer.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from threading import Lock

from headrace.broker.blocks import chain_seed, extend_chain_packed
from headrace.broker.codec import pack_u64

_ENTRY = 300  # bytes of an entry without its strings: key, tuple, links; rounded up
_RUN = 64  # blocks that are hashed and cached together

Reuse = Callable[[int, int], None]


class ByteLru:
    """An LRU cache of bytes, bounded in bytes. Safe to use from several threads; each call takes the lock once."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, tuple[bytes, int]] = OrderedDict()
        self._lock = Lock()
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get_many(self, keys: Sequence[Hashable]) -> list[bytes | None]:
        """Return the values of the keys, None for missing ones."""
        found: list[bytes | None] = []
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None:
                    self._entries.move_to_end(key)
                found.append(None if entry is None else entry[0])
        return found

    def put_many(self, items: Sequence[tuple[Hashable, bytes, int]]) -> None:
        """Add items of (key, value, bytes of both). Items larger than the whole cache are not kept."""
        with self._lock:
            for key, value, size in items:
                size += _ENTRY
                if size > self._max_bytes or key in self._entries:
                    continue
                self._entries[key] = value, size
                self.size += size
                while self.size > self._max_bytes:
                    _, (_, freed) = self._entries.popitem(last=False)
                    self.size -= freed


class PromptCache:
    """The prompt cache of a process, shared by all models."""

    def __init__(self, max_bytes: int, *, on_reuse: Reuse | None = None) -> None:
        """`on_reuse` gets the number of cached and of new tokens of each prompt. It is called from any thread."""
        self._pieces = ByteLru(max_bytes * 2 // 3)
        self._runs = ByteLru(max_bytes // 3)
        self._on_reuse = on_reuse

    @property
    def size(self) -> int:
        """Return the bytes held now, as an upper estimate."""
        return self._pieces.size + self._runs.size

    def ids(self, tokenizer: str, pieces: Sequence[str], encode: Callable[[list[str]], list[bytes]]) -> bytes:
        """Return the packed ids of the pieces, joined. `encode` computes those that are not cached."""
        keys = [(tokenizer, piece) for piece in pieces]
        found = self._pieces.get_many(keys)
        missing = list(dict.fromkeys(piece for piece, ids in zip(pieces, found, strict=True) if ids is None))
        fresh = dict(zip(missing, encode(missing), strict=True)) if missing else {}
        self._pieces.put_many([((tokenizer, piece), ids, sys.getsizeof(piece) + len(ids)) for piece, ids in fresh.items()])
        whole = b"".join(ids if ids is not None else fresh[piece] for piece, ids in zip(pieces, found, strict=True))
        if self._on_reuse is not None:
            known = sum(len(ids) for ids in found if ids is not None) // 4
            self._on_reuse(known, len(whole) // 4 - known)
        return whole

    def chain(self, packed: bytes, block_size: int, *, adapter: str | None = None, salt: str | None = None) -> bytes:
        """Return `headrace.broker.blocks.block_chain` of packed ids, packed."""
        width = block_size * 4
        value = chain_seed(adapter, salt)
        runs = [packed[at : at + width * _RUN] for at in range(0, len(packed) - width + 1, width * _RUN)]
        chains: list[bytes] = []
        fresh: list[tuple[Hashable, bytes, int]] = []
        for run in runs:
            whole = len(run) == width * _RUN
            known = self._runs.get_many([(block_size, value, run)])[0] if whole else None
            if known is None:
                known = _hashes(run, width, value)
                if whole:
                    fresh.append(((block_size, value, run), known, len(run) + len(known)))
            chains.append(known)
            value = int.from_bytes(known[-8:], "little")
        self._runs.put_many(fresh)
        return b"".join(chains)


def _hashes(run: bytes, width: int, value: int) -> bytes:
    chain: list[int] = []
    for end in range(width, len(run) + 1, width):
        value = extend_chain_packed(value, run[end - width : end])
        chain.append(value)
    return pack_u64(chain)
