"""Finds stop strings in a stream of text.

The answer is cut where the first stop string *starts* (the shorter one, if two start there), exactly as if the whole text had
been searched at once, however it was cut into pieces. Only text that may still turn out to be part of a stop string is held
back.

An Aho-Corasick automaton needs one dict lookup per character, whatever the number and length of the stop strings, so that no
request can slow a worker's event loop with them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable


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
