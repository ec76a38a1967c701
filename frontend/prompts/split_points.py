"""Finds the points where a prompt can be split so that the pieces, tokenised one by one, give the ids of the whole.

A tokenizer first takes the tokens added to its vocabulary (special tokens above all) out of the raw text. The text between them
goes through normaliser, pre-tokenizer and model piece by piece. So a cut right before such a token changes nothing, if the
tokenizer is sure to find the token there. That holds for an added token

- that is searched in the raw text (not normalised), at any position (not only as a single word),
- that includes no white space before it, and does not begin with any,
- that no other added token searched in the raw text can overlap from the left,
- and if all longer added tokens that begin with it have these properties as well.

The cut is before the token, never behind it, because a piece that begins the text may be treated differently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from tokenizers import Tokenizer

_WINDOW = 1 << 16  # characters searched at a time, because the search holds the interpreter's lock


def cut_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the added tokens before which every text can be cut, longest first."""
    if tokenizer.encode_special_tokens:  # special tokens are treated as ordinary text
        return []
    raw = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content and not token.normalized]
    overlaps = _Overlaps([token.content for token in raw])
    greedy = [token.content for token in raw if token.lstrip or token.single_word]
    safe = [
        token.content
        for token in raw
        if not token.content[0].isspace()
        and not any(other.startswith(token.content) for other in greedy)
        and not overlaps.into(token.content)
    ]
    return sorted(safe, key=lambda content: (-len(content), content))


class _Overlaps:
    """Finds tokens that another one can overlap from the left. Some models have thousands, so pairs are not compared."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._ends = {token[k:] for token in tokens for k in range(1, len(token))}
        self._insides = "\0".join(token[1:] for token in tokens)

    def into(self, token: str) -> bool:
        """Return True if a token ends with a beginning of this one, or contains it."""
        return token in self._insides or any(token[:k] in self._ends for k in range(1, len(token) + 1))


class SplitPoints:
    """Splits texts for one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = cut_tokens(tokenizer)
        self._pattern = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self._longest = max(map(len, tokens), default=0)

    def split(self, text: str) -> list[str]:
        """Split a text into pieces that join to it. All but the first begin with an added token."""
        cuts = [0, *(at for at in self._cuts(text) if at), len(text)]
        return [text[start:end] for start, end in pairwise(cuts)]

    def _cuts(self, text: str) -> Iterator[int]:
        if self._pattern is None:
            return
        for start in range(0, len(text), _WINDOW):
            end = start + _WINDOW
            for found in self._pattern.finditer(text, start, min(end + self._longest, len(text))):
                if found.start() >= end:
                    break  # the next window finds it again
                yield found.start()
