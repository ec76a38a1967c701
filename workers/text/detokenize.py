"""Detokenises incrementally: token ids in, whole characters out.

The text of an answer is the text that it adds to its prompt. A character whose bytes are spread over tokens is released with
the token that completes it; bytes that cannot become a character are released as U+FFFD as soon as that is certain.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from headrace.workers.text.tokens import Decode, TokenTable

_LONGEST_CHARACTER = 4  # bytes, in UTF-8
_CONTEXT = 8  # prompt tokens at the start of a window
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Detokenises an answer."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; it may be empty."""

    def finish(self) -> str:
        """Return the rest of an incomplete character, at the end of the answer."""


def detokenizer(table: TokenTable, *, prompt_ids: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
    """Create the detokenizer for an answer to this prompt."""
    if table.decode is not None:
        return _Window(table.decode, prompt_ids=prompt_ids, skip_special_tokens=skip_special_tokens)
    return _Table(table, prompt_ids=prompt_ids, skip_special_tokens=skip_special_tokens)


class _Table:
    """Detokenises by table: a lookup per token, and a decode only around split characters."""

    __slots__ = ("_first", "_odd", "_pending", "_pieces", "_skipped", "_texts")

    def __init__(self, table: TokenTable, *, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._texts = table.plain if skip_special_tokens else table.texts
        self._pieces = table.pieces
        self._skipped = table.special if skip_special_tokens else frozenset[int]()
        self._pending = self._open_character(prompt_ids)
        at_start = table.first is not None and all(i in self._skipped for i in prompt_ids)
        self._first = table.first if at_start else None
        self._odd = bool(self._pending) or self._first is not None  # The next token's text is not just its table entry.

    def _open_character(self, prompt_ids: Sequence[int]) -> bytes:
        """Return the bytes of an incomplete character at the prompt's end, which belongs to the answer that completes it."""
        known = (i for i in reversed(prompt_ids) if i not in self._skipped and 0 <= i < len(self._pieces))
        tail = b"".join(reversed([self._pieces[i] for i in islice(known, _LONGEST_CHARACTER)]))[-_LONGEST_CHARACTER:]
        _, used = utf_8_decode(tail, "replace", False)
        return tail[used:]

    def push(self, token_id: int) -> str:
        try:
            text = self._texts[token_id]
        except IndexError:  # Models have embedding rows beyond their tokenizer.
            return ""
        if text is None or self._odd:
            return self._slow(token_id)
        return text

    def _slow(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        data = self._pieces[token_id]
        if self._first is not None and data:
            data, self._first = self._first(data), None
        data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        self._odd = used < len(data) or self._first is not None
        return text

    def finish(self) -> str:
        rest, self._pending = self._pending, b""
        return rest.decode(errors="replace")


class _Window:
    """Detokenises by the library: decodes the last tokens with and without the new one and returns the added text.

    Text is held back while it ends in U+FFFD, which may still become a character, for at most as many tokens as a character
    has bytes, because the model may also mean U+FFFD itself.
    """

    __slots__ = ("_decode", "_held", "_ids", "_shown", "_skip")

    def __init__(self, decode: Decode, *, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._decode = decode
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._shown = decode(self._ids, skip_special_tokens)
        self._held = 0  # tokens at the end of `_ids` whose text is not released yet

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        self._held += 1
        text = self._decode(self._ids, self._skip)
        if not text.endswith(_REPLACEMENT):
            return self._release(text)
        if self._held < _LONGEST_CHARACTER:
            return ""
        held = _LONGEST_CHARACTER - 1  # These last tokens may still begin a character; the text before them is certain.
        return self._release(self._decode(self._ids[:-held], self._skip), held=held)

    def finish(self) -> str:
        return self._release(self._decode(self._ids, self._skip)) if self._held else ""

    def _release(self, text: str, *, held: int = 0) -> str:
        """Return the part of `text`, which is all but the last `held` tokens, that has not been shown."""
        added = text[len(self._shown) :]
        self._held = held
        if len(self._ids) >= 2 * _CONTEXT:
            del self._ids[:-_CONTEXT]
            text = self._decode(self._ids[: _CONTEXT - held], self._skip)
        self._shown = text
        return added
