"""An open request as its judge keeps it: the current run, the tokens emitted so far, and the crashes that count against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.broker.messages.control import HistoryEntry, SinceItem
from headrace.broker.messages.frames import Finish, JobFault, Row
from headrace.broker.protocol.quarantine import Clearance, Crash, Grant, base_worker, counted, crashes_of
from headrace.broker.protocol.resume import GENERATION, CrashRecorder, Resume


class RowReader(Protocol):
    """Takes the rows of one request."""

    def take(self, row: Row, now_s: float) -> bool:
        """Take a row. False: the reader is full, and the row will be asked for again."""

    def end(self, fault: JobFault | None) -> None:
        """End the request, with a fault or, None, with an answer."""


class _NoReader:
    """Stands for the reader of a request that has ended."""

    def take(self, row: Row, now_s: float) -> bool:
        return True

    def end(self, fault: JobFault | None) -> None:
        pass


NO_READER = _NoReader()


class JobRecord:
    """An open request.

    `held` has the (attempt, worker) pairs of which it is known that the worker really had the attempt.  `spared` has those of
    which it is known that the worker was alive when the attempt was no longer its own: they never count as crashes.
    `granted` has what each of them promised about the jobs beside this one.  Crashes of attempts below `cleared` are forgiven,
    because a later run has gone on; `clearance` watches the current run for that while crashes count.
    """

    __slots__ = (
        "attempt",
        "choices",
        "clearance",
        "clearances",
        "cleared",
        "emitted",
        "finished",
        "generation",
        "granted",
        "heard_s",
        "held",
        "history",
        "id",
        "open_choices",
        "paused",
        "pool",
        "reader",
        "recorder",
        "run",
        "spared",
        "worker",
    )

    def __init__(self, request_id: str, pool: str, choices: int, reader: RowReader, now_s: float) -> None:
        self.id = request_id
        self.pool = pool
        self.choices = choices
        self.reader: RowReader = reader
        self.recorder: CrashRecorder | None = None  # must have stored all crashes before a claim is granted
        self.attempt = 1
        self.run: int | None = None
        self.worker: str | None = None
        self.emitted: list[list[int]] = [[] for _ in range(choices)]
        self.finished: list[Finish | None] = [None] * choices
        self.open_choices = choices
        self.history: set[HistoryEntry] = set()
        self.held: set[tuple[int, str]] = set()
        self.spared: set[tuple[int, str]] = set()
        self.granted: dict[tuple[int, str], Grant] = {}
        self.cleared = 0
        self.clearances = 0
        self.clearance: Clearance | None = None
        self.generation = 0
        self.heard_s = now_s
        self.paused = False

    def restore(self, resume: Resume) -> None:
        """Go on from what another judge has recorded. No attempt of its generations can be taken for one of this record."""
        self.emitted = [list(ids) for ids in resume.emitted]
        self.finished = list(resume.finished)
        self.open_choices = sum(fin is None for fin in resume.finished)
        self.history = set(resume.history)
        self.held = {(entry.attempt, base_worker(entry.worker)) for entry in resume.history}
        self.generation = resume.generation
        self.attempt = resume.generation * GENERATION

    def end(self, fault: JobFault | None) -> None:
        """End the reader's stream and drop the reader.

        A reader may hold the record of its request for longer, and two objects that hold each other are freed late, by a run of
        the garbage collector that costs more than all that freed the rest of the request.
        """
        reader, self.reader = self.reader, NO_READER
        reader.end(fault)

    def hold(self, attempt: int, worker: str) -> None:
        if (attempt, worker) not in self.spared:
            self.held.add((attempt, worker))

    def spare(self, attempt: int, worker: str) -> None:
        self.held.discard((attempt, worker))
        self.spared.add((attempt, worker))

    def crashes(self, accounted: Callable[[str], bool]) -> list[Crash]:
        """Return the crashes that count. `accounted(worker)`: its process did not crash."""
        if not self.history:
            return []
        entries = counted((entry for entry in self.history if entry.attempt >= self.cleared), self.held, accounted)
        return crashes_of(entries, self.granted)

    def evidence(self, crashes: Sequence[Crash]) -> list[HistoryEntry]:
        """Return the entries of these crashes, as another judge of the request has to know them."""
        found = []
        for crash in crashes:
            of_it = [e.worker for e in self.history if e.attempt == crash.attempt and base_worker(e.worker) == crash.worker]
            found.append(HistoryEntry(crash.attempt, max(of_it, key=len), crash.group))  # the longest has its suffix
        return found

    def clear(self) -> None:
        """Forgive all crashes so far: the current run has passed them by far."""
        self.cleared = self.attempt
        self.clearances += 1
        self.clearance = None
        if self.worker is not None:
            self.granted.pop((self.attempt, self.worker), None)

    def offsets(self) -> SinceItem:
        return SinceItem(self.id, [len(ids) for ids in self.emitted])
