"""Refuses texts that are far too long before they are tokenised as a whole.

A tokenizer keeps some 150 bytes per token while it works, so a text of 30 MB can take gigabytes before it is refused. Long
texts are therefore counted piece by piece until they exceed the limit, and many texts are tokenised a few at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from tokenizers import Tokenizer

T = TypeVar("T", bound="str | tuple[str, str]")

LONG = 1 << 20  # characters; the tokens of a text up to this length fit into some hundred megabytes
SUSPICIOUS = 8  # characters per token of the context; ordinary text has three to five
PIECE = 256 * 1024  # characters
_CUT = 16  # tokens that cutting a text in two may add


def is_suspicious(text: str, context_length: int) -> bool:
    """Return True if only an unusual text of this length would fit into the context."""
    return len(text) > max(PIECE, SUSPICIOUS * context_length)


def least_tokens(tokenizer: Tokenizer, text: str, *, enough: int) -> int:
    """Return a lower bound of the number of tokens. Counting stops a little above `enough`."""
    tokens = 0
    for at in range(0, len(text), PIECE):
        piece = tokenizer.encode_batch_fast([text[at : at + PIECE]], add_special_tokens=False)[0]
        tokens += max(0, len(piece) - _CUT)
        if tokens > enough:
            break
    return tokens


def in_groups(texts: Sequence[T]) -> Iterator[list[T]]:
    """Yield texts, or pairs of them, in order, in groups of at most `LONG` characters or of a single one."""
    group: list[T] = []
    size = 0
    for text in texts:
        more = len(text) if isinstance(text, str) else sum(map(len, text))
        if group and size + more > LONG:
            yield group
            group, size = [], 0
        group.append(text)
        size += more
    if group:
        yield group
