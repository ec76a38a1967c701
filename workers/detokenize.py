"""Detokenises incrementally: token ids in, whole characters out.

The text of an answer is the text that it adds to its prompt. A character whose bytes are spread over tokens is released with
the token that completes it; bytes that cannot become a character are released as U+FFFD as soon as that is certain.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.workers.tokens import Decode, TokenTable

_LONGEST_CHARACTER = 4  # bytes, in UTF-8
_CONTEXT = 8  # prompt tokens at the start of a window
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
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
        tail, known = b"", len(self._pieces)
        for token_id in reversed(prompt_ids):
            if token_id not in self._skipped and 0 <= token_id < known:
                tail = self._pieces[token_id] + tail
                if len(tail) >= _LONGEST_CHARACTER:
                    break
        tail = tail[-_LONGEST_CHARACTER:]
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


# Finds stop strings in a stream of text.
#
# The answer is cut where the first stop string *starts* (the shorter one, if two start there), exactly as if the whole text
# had been searched at once, however it was cut into pieces. Only text that may still turn out to be part of a stop string is
# held back.
#
# An Aho-Corasick automaton needs one dict lookup per character, whatever the number and length of the stop strings, so that
# no request can slow a worker's event loop with them.


class StopStrings:
    """The automaton of some stop strings, made once for all choices of a request. Empty strings never match."""

    __slots__ = ("_edges", "_fail", "begins", "depth", "word")

    def __init__(self, stops: Iterable[str]) -> None:
        self.depth = [0]
        self.word: list[str | None] = [None]  # the longest stop string that ends at this node
        self._edges: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._build([stop for stop in stops if stop])
        self.begins = (
            re.compile("[" + "".join(re.escape(char) for char in sorted(self._edges[0])) + "]") if self._edges[0] else None
        )

    def _build(self, stops: list[str]) -> None:
        for stop in stops:
            node = 0
            for char in stop:
                if char not in self._edges[node]:
                    self._edges[node][char] = len(self._edges)
                    self._edges.append({})
                    self.depth.append(self.depth[node] + 1)
                    self._fail.append(0)
                    self.word.append(None)
                node = self._edges[node][char]
            self.word[node] = stop
        queue = deque(self._edges[0].values())
        while queue:
            node = queue.popleft()
            if self.word[node] is None:
                self.word[node] = self.word[self._fail[node]]
            for char, child in self._edges[node].items():
                self._fail[child] = self.next(self._fail[node], char)
                queue.append(child)

    def next(self, node: int, char: str) -> int:
        """Return the node that follows with this character."""
        while char not in self._edges[node]:
            if node == 0:
                return 0
            node = self._fail[node]
        return self._edges[node][char]


class StopMatcher:
    """Feed text with `push`, end with `finish`. Once `stopped` is set no text is released."""

    __slots__ = ("_begins", "_best", "_buffer", "_depth", "_include", "_next", "_node", "_word", "stopped")

    def __init__(self, stops: StopStrings | Iterable[str], *, include_stop: bool) -> None:
        strings = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self.stopped: str | None = None
        self._include = include_stop
        self._buffer = ""  # unreleased text; its end is the automaton's position
        self._node = 0
        self._best: tuple[int, str] | None = None  # (start in the buffer, stop string): the match to beat
        self._next = strings.next
        self._depth = strings.depth
        self._word = strings.word
        self._begins = strings.begins

    def push(self, text: str) -> str:
        """Return the text that is safe to show now."""
        if self._node == 0 and self._best is None and (self._begins is None or self._begins.search(text) is None):
            return text if self.stopped is None else ""
        return self._scan(text)

    def _scan(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        at = len(self._buffer)
        self._buffer += text
        node = self._node
        for char in text:
            at += 1
            node = self._next(node, char)
            word = self._word[node]
            if word is not None and (self._best is None or at - len(word) < self._best[0]):
                self._best = (at - len(word), word)
            if self._best is not None and at - self._depth[node] >= self._best[0]:
                return self._cut(*self._best)
        self._node = node
        keep = at - self._depth[node]
        if self._best is not None:
            self._best = (self._best[0] - keep, self._best[1])
        released, self._buffer = self._buffer[:keep], self._buffer[keep:]
        return released

    def finish(self) -> str:
        """Return the held-back text. A match that waited for an earlier one to complete counts now."""
        if self._best is not None and self.stopped is None:
            return self._cut(*self._best)
        released, self._buffer, self._node = self._buffer, "", 0
        return released

    def _cut(self, start: int, stop: str) -> str:
        released = self._buffer[: start + (len(stop) if self._include else 0)]
        self.stopped, self._buffer, self._node, self._best = stop, "", 0, None
        return released


# Turns the token ids of an answer into text and cuts it at the stop string.
#
# The text is a pure function of the id sequence: a pipeline through which a prefix of the ids is replayed is in exactly the
# state of the first run.

__all__ = ["TextPipeline", "TokenTable"]


class TextPipeline:
    """Produces the text of a choice. Stop strings count only in the text after the first `min_tokens` tokens."""

    __slots__ = ("_detokenize", "_end", "_immune", "_stops")

    def __init__(
        self,
        table: TokenTable,
        *,
        prompt_ids: Sequence[int],
        stop: Sequence[str] | StopStrings = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        detokenize = detokenizer(table, prompt_ids=prompt_ids, skip_special_tokens=skip_special_tokens)
        self._detokenize = detokenize.push
        self._end = detokenize.finish
        wanted = stop and (isinstance(stop, StopStrings) or any(stop))
        self._stops = StopMatcher(stop, include_stop=include_stop) if wanted else None
        self._immune = min_tokens

    def push(self, token_id: int) -> str:
        """Return the text released by this token: no incomplete character, no possible beginning of a stop string."""
        text = self._detokenize(token_id)
        if self._stops is None:
            return text
        if self._immune > 0:
            self._immune -= 1
            return text
        return self._stops.push(text)

    @property
    def pusher(self) -> Callable[[int], str]:
        """Return `push`, or its inner function if there are no stop strings, for callers on the per-token path."""
        return self._detokenize if self._stops is None else self.push

    def last(self, token_id: int, *, hidden: bool) -> str:
        """Add the token with which the engine ended the answer; `hidden` if it is not part of the text."""
        return "" if hidden else self.push(token_id)

    def finish(self) -> str:
        """Return the held-back text, at the end of the answer. May still set `stopped`."""
        text = self._end()
        if self._stops is None:
            return text
        return self._stops.push(text) + self._stops.finish()

    @property
    def stopped(self) -> str | None:
        """Return the stop string that ended the text, if one did. No text is released after it."""
        return self._stops.stopped if self._stops is not None else None


# Finds the token with which a model's prompts begin: its BOS, for requests that Headrace makes up itself.
#
# Some models answer nonsense, or fail in an assertion, when a sequence does not begin as their training did.

CONFIGS = ("generation_config.json", "config.json")  # the tokenizer's own word goes before these


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _Tokenizer(msgspec.Struct):
    added_tokens: list[dict[str, Any]] = []
    model: _Model = msgspec.field(default_factory=_Model)


def first_token(folder: str | Path, *, vocab_size: int) -> int:
    """Return the id of the model's BOS, or where it has none a token that every vocabulary has: 1, or 0 in a tiny one.

    Reads files, of which a tokenizer may have some 10 MB, so call it in a thread.
    """
    found = _by_tokenizer(Path(folder))
    for name in CONFIGS:
        if found is None:
            given = _json(Path(folder) / name).get("bos_token_id")
            found = given if isinstance(given, int) and not isinstance(given, bool) else None
    if found is None or not 0 <= found < vocab_size:
        return 1 if vocab_size > 1 else 0
    return found


def _by_tokenizer(folder: Path) -> int | None:
    text = _json(folder / "tokenizer_config.json").get("bos_token") or _json(folder / "special_tokens_map.json").get(
        "bos_token"
    )
    if isinstance(text, dict):  # as older configurations write it
        text = text.get("content")
    if not isinstance(text, str):
        return None
    with suppress(OSError, msgspec.DecodeError, KeyError):
        tokenizer = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_Tokenizer)
        added = next((token["id"] for token in tokenizer.added_tokens if token.get("content") == text), None)
        if added is not None:
            return int(added)
        vocabulary = tokenizer.model.vocab
        if isinstance(vocabulary, dict):
            return vocabulary.get(text)
        return next((i for i, entry in enumerate(vocabulary) if entry and entry[0] == text), None)
    return None


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, msgspec.DecodeError):
        found = msgspec.json.decode(path.read_bytes())
        if isinstance(found, dict):
            return found
    return {}
