"""The memory of the index as the interpreter has it: lists, and a dict. `_blocks.pyx` is the same in C."""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import islice, repeat


class Words:
    """Numbers below 2**64, which are read and written in `at`."""

    def __init__(self, size: int) -> None:
        self.at = [0] * size

    def __len__(self) -> int:
        return len(self.at)

    def resize(self, size: int) -> None:
        """Change the length. What is new is zero."""
        if size < len(self.at):
            del self.at[size:]
        else:
            self.at += repeat(0, size - len(self.at))

    def packed(self, start: int, count: int) -> bytes:
        """Return some as little endian. Raises OverflowError or TypeError for a number that is not a u64."""
        values = array("Q", self.at[start : start + count])
        if sys.byteorder == "big":
            values.byteswap()
        return values.tobytes()

    @property
    def nbytes(self) -> int:
        return sys.getsizeof(self.at)


class Blocks(dict[int, int]):
    """Maps blocks to numbers of sets, of which 0 is the same as no entry.

    Of blocks that were touched it knows the order in which that happened: the others are never among the oldest.
    """

    implementation = "pure"
    step = 65_536  # blocks that are read at once
    batch = sys.maxsize  # entries evicted at once: picking victims costs a pass over those evicted before

    def __init__(self) -> None:
        super().__init__()
        self._keys: list[int] = []
        self.sets: list[int] = []
        self._used: dict[int, None] = {}  # longest unused first

    @property
    def nbytes(self) -> int:
        return sys.getsizeof(self) + sys.getsizeof(self._used) + len(self) * sys.getsizeof(1 << 63)

    # Chains that are asked for.

    def chain(self, blocks: Sequence[int]) -> Sequence[int]:
        return blocks

    def look(self, chain: Sequence[int], start: int, count: int) -> int:
        """Put the sets of some blocks of a chain into `sets`. Return how many."""
        self.sets = list(map(self.get, chain[start : start + count], repeat(0)))
        return count

    def run(self, begin: int, count: int) -> int:
        """Return the end of the run in `sets` that begins there and has one set."""
        sets, first, at, width = self.sets, self.sets[begin], begin + 1, 8
        if begin == 0 and sets.count(first) == count:
            return count
        while at + width <= count and sets[at : at + width] == [first] * width:
            at, width = at + width, 2 * width
        while at < count and sets[at] == first:
            at += 1
        return at

    def at(self, chain: Sequence[int], place: int) -> int:
        return self.get(chain[place], 0)

    def fetch(self, chain: Sequence[int], low: int, step: int, count: int) -> None:
        """Have the entries of every so many blocks after `low` loaded from memory, all at once."""

    def lowest(self, word: int) -> int:
        """Return the number of the lowest bit that is set."""
        return (word & -word).bit_length() - 1

    # Runs of blocks that are changed: `read` some, then `put` those that have one set into another.

    def read(self, chain: Sequence[int], start: int, count: int) -> int:
        """Return how many there are to look at in `sets`."""
        keys = list(chain[start : start + count])
        self._keys = keys if len(set(keys)) == len(keys) else list(dict.fromkeys(keys))
        self.sets = list(map(self.get, self._keys, repeat(0)))
        return len(self._keys)

    def read_words(self, words: Words, start: int, count: int) -> int:
        return self.read(words.at, start, count)

    def put(self, begin: int, end: int, origin: int, result: int) -> int:
        """Give this run of what was read another set, if it still has `origin`. Return how many had."""
        part = self._keys[begin:end]
        if result:
            self.update(zip(part, repeat(result)))
        else:
            deque(map(self.pop, part), maxlen=0)
            if self._used:
                deque(map(self._used.pop, part, repeat(None)), maxlen=0)
        return len(part)

    def append(self, words: Words, begin: int, count: int) -> None:
        """Append blocks that were read, and perhaps put, from `begin` on."""
        words.at += self._keys[begin : begin + count]

    def erase(self, block: int) -> None:
        del self[block]
        self._used.pop(block, None)

    # Use.

    def touch(self, chain: Sequence[int], start: int, count: int, length: int) -> None:
        """Mark entries as used. The last one becomes the first to go: without its head no tail is of use."""
        part = chain[start : start + count]
        deque(map(self._used.pop, part, repeat(None)), maxlen=0)
        self._used.update(dict.fromkeys(reversed(part)))

    def oldest(self, count: int) -> list[int]:
        """Return some of the entries that are unused for longest, perhaps fewer than `count`."""
        return list(islice(self._used, count))
