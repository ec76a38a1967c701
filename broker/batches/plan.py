"""Keeps the places of the lines of an input file, 24 bytes a line, and the order in which they are published.

Lines that begin alike come one after the other, so that they find their common prefix in a worker's cache; the groups are in
the order of the file. All lines of a batch have the same deadline, so the order costs none of them its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

VERSION = 1  # of the order: an owner that knows another one publishes what has no result from the start

GAP = 64 * 1024  # bytes between two lines that are read together all the same
RANGE = 1024 * 1024  # bytes that are read together


class LinePlan:
    """The lines of one input file. Lines are numbered from 1, blank ones left out."""

    __slots__ = ("_group", "_length", "_offset", "_order", "_whole", "digest", "prompt_tokens")

    def __init__(self) -> None:
        self._offset = array("Q")
        self._length = array("I")
        self._group = array("I")  # hash of the beginning, such as a system prompt
        self._whole = array("I")  # hash of more of it
        self._order = array("I")
        self.digest = ""
        self.prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._offset)

    def add(self, offset: int, length: int, group: int, whole: int) -> None:
        """Add the next line of the file, with 32-bit hashes of the beginning of its prompt."""
        self._offset.append(offset)
        self._length.append(length)
        self._group.append(group)
        self._whole.append(whole)

    def close(self, digest: str, prompt_tokens: int) -> None:
        """Order the lines. `digest` names the file's content."""
        groups: dict[int, int] = {}
        wholes: dict[int, int] = {}
        for i, (group, whole) in enumerate(zip(self._group, self._whole, strict=True)):
            groups.setdefault(group, i)
            wholes.setdefault(whole, i)
        ranks = [(groups[group], wholes[whole]) for group, whole in zip(self._group, self._whole, strict=True)]
        self._order = array("I", (i + 1 for i in sorted(range(len(self)), key=ranks.__getitem__)))
        self.digest = digest
        self.prompt_tokens = prompt_tokens

    def published(self, start: int, stop: int) -> Sequence[int]:
        """Return the numbers of the lines from one place of the order to another."""
        return self._order[start:stop]

    def place(self, number: int) -> tuple[int, int]:
        """Return offset and length of a line."""
        return self._offset[number - 1], self._length[number - 1]

    def ranges(self, numbers: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
        """Yield offset and length of the parts of the file that have these lines, and the lines of each part."""
        start = stop = 0
        inside: list[int] = []
        for number in sorted(numbers):
            offset, length = self.place(number)
            if inside and (offset - stop > GAP or offset + length - start > RANGE):
                yield start, stop - start, inside
                inside = []
            if not inside:
                start = offset
            stop = offset + length
            inside.append(number)
        if inside:
            yield start, stop - start, inside
