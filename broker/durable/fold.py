"""Folds the entries of a job's stream into the state that they say: tokens, takers, crashes, and the end.

Pure. A carrier resumes from that state, a reader checks what it passes on. Nothing that was not appended ever existed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.broker.durable.errors import StreamIncomplete
from headrace.broker.messages import Finish, HistoryEntry, Row, StreamEntry


@dataclass(frozen=True, slots=True)
class Take:
    """The fence that a carrier set with delivery `nonce`."""

    nonce: str
    carrier: str


@dataclass(slots=True)
class JobState:
    """The state of a job as its entries say, in the order of their sequences.

    `last_seq`: sequence of the last entry on the subject, 0 = there is none; `writer` is its (nonce, n). `begun`: deliveries
    that got as far as `ok`, rows or an end. `events`: number of events so far, which is the number of the next one.
    """

    last_seq: int = 0
    writer: tuple[str, int] = ("", 0)
    takes: list[Take] = field(default_factory=list)
    begun: set[str] = field(default_factory=set)
    emitted: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, Finish] = field(default_factory=dict)
    entries: list[StreamEntry] = field(default_factory=list)  # those with rows or events, in order
    history: list[HistoryEntry] = field(default_factory=list)
    events: int = 0
    end: StreamEntry | None = None
    _written: dict[str, int] = field(default_factory=dict)  # entries of each delivery

    def apply(self, seq: int, entry: StreamEntry) -> None:
        """Take the next entry. Raises StreamIncomplete if it does not join what was before it."""
        if self.end is not None:
            raise StreamIncomplete(f"entry {seq} of {entry.nonce!r} follows the end of the stream")
        before = self._written.get(entry.nonce, 0)
        if entry.n != before + 1:
            raise StreamIncomplete(f"entry {seq} is number {entry.n} of delivery {entry.nonce!r}, after number {before}")
        if entry.events and entry.first_event != self.events:
            raise StreamIncomplete(f"entry {seq} begins with event {entry.first_event}, after {self.events} events")
        for row in entry.rows:
            self._row(seq, row)
        self._written[entry.nonce] = entry.n
        self.events += len(entry.events)
        if entry.rows or entry.events:
            self.entries.append(entry)
        if entry.kind == "take":
            self.takes.append(Take(entry.nonce, entry.carrier))
        elif entry.kind == "crash":
            self.history += [crash for crash in entry.history if crash not in self.history]
        else:
            self.begun.add(entry.nonce)
        if entry.kind == "end":
            self.end = entry
        self.last_seq, self.writer = seq, (entry.nonce, entry.n)

    def _row(self, seq: int, row: Row) -> None:
        have = self.emitted.setdefault(row.choice, [])
        if row.choice in self.finished or row.offset != len(have):
            raise StreamIncomplete(f"entry {seq} has tokens of choice {row.choice} from {row.offset} on, after {len(have)}")
        have += row.ids
        if row.fin is not None:
            self.finished[row.choice] = row.fin

    def emitted_of(self, choices: int) -> list[list[int]]:
        """Return the token ids of each choice."""
        return [list(self.emitted.get(choice, ())) for choice in range(choices)]

    def finished_of(self, choices: int) -> list[Finish | None]:
        """Return the end of each choice, None for those that are open."""
        return [self.finished.get(choice) for choice in range(choices)]

    def unbegun(self) -> list[Take]:
        """Return the takes whose carriers did not get as far as `ok`."""
        return [take for take in self.takes if take.nonce not in self.begun]


def fold(entries: Iterable[tuple[int, StreamEntry]]) -> JobState:
    """Return the state after these entries, given with their sequences. Raises StreamIncomplete."""
    state = JobState()
    for seq, entry in entries:
        state.apply(seq, entry)
    return state
