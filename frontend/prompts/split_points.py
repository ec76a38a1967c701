"""Where a prompt can be cut so that the pieces, tokenised one by one, give the ids of the whole.

A tokenizer takes the tokens added to its vocabulary (special tokens above all) out of the raw text first, and what lies between
them goes through normaliser, pre-tokenizer and model piece by piece.  So a cut right before such a token changes nothing,
if the tokenizer is sure to see the token there.  That holds for an added token

- that is looked for in the raw text (not normalised), wherever it stands (not only as a single word),
- that takes no white space before it along, and does not begin with any itself,
- into which no other added token that is looked for in the raw text can reach from the left,
- and of which all longer ones that begin with it have these properties as well.

The cut is before the token, never behind it: a piece that begins the text may be treated in a way of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from tokenizers import Tokenizer

_WINDOW = 1 << 16  # characters searched in one go: the search holds the interpreter's lock


def cut_tokens(tokenizer: Tokenizer) -> list[str]:
    """The added tokens before which every text can be cut, longest first."""
    if tokenizer.encode_special_tokens:  # special tokens are taken for ordinary text
        return []
    raw = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content and not token.normalized]
    reaching = _Reaching([token.content for token in raw])
    greedy = [token.content for token in raw if token.lstrip or token.single_word]
    safe = [
        token.content
        for token in raw
        if not token.content[0].isspace()
        and not any(other.startswith(token.content) for other in greedy)
        and not reaching.into(token.content)
    ]
    return sorted(safe, key=lambda content: (-len(content), content))


class _Reaching:
    """Which tokens can another one reach into from the left? Some models have thousands of them, so not by pairs."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._ends = {token[k:] for token in tokens for k in range(1, len(token))}
        self._insides = "\0".join(token[1:] for token in tokens)

    def into(self, token: str) -> bool:
        """Does some token end with a beginning of this one, or hold it whole?"""
        return token in self._insides or any(token[:k] in self._ends for k in range(1, len(token) + 1))


class SplitPoints:
    """Cuts texts for one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = cut_tokens(tokenizer)
        self._pattern = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self._longest = max(map(len, tokens), default=0)

    def split(self, text: str) -> list[str]:
        """Pieces that join to the text; all but the first begin with an added token."""
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
