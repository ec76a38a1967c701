"""Text that comes in pieces: finding marks in it, and putting its parts together."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.broker.messages import Part


def overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that may be the beginning of `mark`, all of it left out."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same with neighbours of one kind (and call) in one part."""
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        if last is not None and (last.kind, last.index) == (part.kind, part.index) and part.name is None and part.id is None:
            whole[-1] = Part(last.kind, last.text + part.text, last.index, last.id, last.name)
        else:
            whole.append(part)
    return whole
