"""Computes how much of a prompt an engine should find in its cache, as far as its KV events tell."""

from __future__ import annotations

from collections.abc import Container, Sequence


def cached_tokens(chain: Sequence[int], tokens: int, *, block_size: int, cache: Container[int]) -> int:
    """Return the tokens of the longest prefix in `cache`, in whole blocks. At least one token is left to be computed."""
    blocks = min(len(chain), (tokens - 1) // block_size)
    for n in range(blocks):
        if chain[n] not in cache:
            return block_size * n
    return block_size * blocks
