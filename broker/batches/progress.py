"""Keeps which lines of a batch have a result that was seen: counts follow from that and are never incremented elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace.broker.batches.lines import FileKind, file_kind
from headrace.broker.batches.record import LineCounts
from headrace.broker.messages import JobResult, ResultTokens

_OPEN, _DONE, _FAILED = 0, 1, 2


class LineProgress:
    """The lines of one batch, a byte each."""

    def __init__(self, total: int) -> None:
        self._state = bytearray(total)
        self._done = self._failed = 0
        self._tokens = ResultTokens()
        self._out: dict[int, None] = {}  # an ordered set

    @property
    def out(self) -> list[int]:
        """The lines that were published, by this owner or an earlier one, without a result that was seen: the oldest first."""
        return list(self._out)

    @property
    def waiting(self) -> int:
        """The number of these lines."""
        return len(self._out)

    @property
    def counts(self) -> LineCounts:
        """The counts of the results that were seen."""
        return LineCounts(total=len(self._state), completed=self._done, failed=self._failed)

    @property
    def tokens(self) -> ResultTokens:
        """The tokens of the results that were seen."""
        return self._tokens

    @property
    def complete(self) -> bool:
        """True once a result of every line was seen."""
        return self._done + self._failed == len(self._state)

    def publish(self, numbers: Iterable[int]) -> None:
        """Note that lines may be stored as jobs."""
        self._out.update((number, None) for number in numbers if not self._state[number - 1])

    def see(self, number: int, result: JobResult) -> None:
        """Note the result of a line. It never changes, so a second look changes nothing."""
        self._out.pop(number, None)
        if self._state[number - 1] != _OPEN:
            return
        if file_kind(result) == "output":
            self._state[number - 1] = _DONE
            self._done += 1
        else:
            self._state[number - 1] = _FAILED
            self._failed += 1
        mine, more = self._tokens, result.tokens
        self._tokens = ResultTokens(
            prompt=mine.prompt + more.prompt,
            cached=mine.cached + more.cached,
            completion=mine.completion + more.completion,
            reasoning=mine.reasoning + more.reasoning,
        )

    def open(self, numbers: Iterable[int]) -> list[int]:
        """Return those of the lines that have no result which was seen."""
        return [number for number in numbers if not self._state[number - 1]]

    def of_kind(self, kind: FileKind) -> Iterator[int]:
        """Yield the lines of a file, in the order of the input."""
        wanted = _DONE if kind == "output" else _FAILED
        for i, state in enumerate(self._state):
            if state == wanted:
                yield i + 1
