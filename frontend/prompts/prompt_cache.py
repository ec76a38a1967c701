"""What a long prompt shares with earlier ones is not worked out again: the next turn of a conversation costs what is new.

Two memories of exact results, bounded together in bytes, the least recently used forgotten first:

- the ids of a piece of text that can be tokenised alone (`headrace.frontend.prompts.split_points`), by the tokenizer and
the text itself,
- the block hashes of a run of blocks, by the hash before it and its ids.

Keys are whole, never digests, so nothing that a client sends can bring back another's ids.  Losing everything costs time, never
an answer.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from threading import Lock

from headrace.broker.blocks import chain_seed, extend_chain_packed
from headrace.broker.codec import pack_u64

_ENTRY = 300  # bytes of an entry beside its strings: key, tuple, links; rounded up
_RUN = 64  # blocks hashed, and remembered, together

Reuse = Callable[[int, int], None]


class ByteLru:
    """Bytes by key, at most so many in all. Safe to use from several threads; `many` operations take the lock once."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, tuple[bytes, int]] = OrderedDict()
        self._lock = Lock()
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get_many(self, keys: Sequence[Hashable]) -> list[bytes | None]:
        found: list[bytes | None] = []
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None:
                    self._entries.move_to_end(key)
                found.append(None if entry is None else entry[0])
        return found

    def put_many(self, items: Sequence[tuple[Hashable, bytes, int]]) -> None:
        """(key, value, bytes of both). What is larger than everything may be is not kept."""
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
    """One per process, for all models."""

    def __init__(self, max_bytes: int, *, on_reuse: Reuse | None = None) -> None:
        """`on_reuse` is told, prompt by prompt and from any thread, how many tokens were known and how many were not."""
        self._pieces = ByteLru(max_bytes * 2 // 3)
        self._runs = ByteLru(max_bytes // 3)
        self._on_reuse = on_reuse

    @property
    def size(self) -> int:
        """Bytes held now; an estimate that is on the high side."""
        return self._pieces.size + self._runs.size

    def ids(self, tokenizer: str, pieces: Sequence[str], encode: Callable[[list[str]], list[bytes]]) -> bytes:
        """The packed ids of the pieces, one after another. `encode` is asked for those that are not known."""
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
        """`headrace.broker.blocks.block_chain` of packed ids, packed."""
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
