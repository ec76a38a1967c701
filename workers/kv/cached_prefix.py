"""Computes how much of a prompt an engine should find in its cache, as far as its KV events tell."""

from __future__ import annotations

from collections.abc import Container, Sequence


def cached_tokens(chain: Sequence[int], tokens: int, *, block_size: int, cache: Container[int], engine_block: int = 0) -> int:
    """Return the tokens of the longest prefix in `cache`, in whole blocks. At least one token is left to be computed.

    `block_size`: tokens of the chain's blocks. `engine_block`: those of the engine's, a multiple of that, 0 = the same; a part
    of one is of no use.  Nothing is known (0) of an engine whose blocks are no multiple.
    """
    whole = engine_block or block_size
    if block_size < 1 or whole % block_size:
        return 0
    blocks = min(len(chain), (tokens - 1) // whole * (whole // block_size))
    found = next((n for n in range(blocks) if chain[n] not in cache), blocks)
    return found * block_size // whole * whole
