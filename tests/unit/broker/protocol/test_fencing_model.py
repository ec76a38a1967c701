"""Claim, fence and resume as a state machine: the real judge, the real logs of the workers, and a network that delivers what it
likes, as often and in whatever order it likes.

Every run says something else after what it was told had been given out, as engines do that sample without a seed. So a token
that a reader gets from anybody but the one that was let go on shows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.broker.messages.control import Check, Claim, HistoryEntry, Refuse, RunRef, RunVerdict, SinceItem
from headrace.broker.messages.frames import Finish, Frame, JobFault, Row
from headrace.broker.messages.requests import Envelope
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.judge import Judge
from headrace.broker.protocol.quarantine import Crash
from headrace.broker.protocol.run import Run, RunState

CHOICES = 2
LENGTHS = (5, 3)  # tokens of each choice
DONE = Finish(reason="stop")
AT_ONCE = 4  # tokens of one step


def token(run: int, place: int) -> int:
    return 1000 * place + run


class Reader:
    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.ends: list[JobFault | None] = []
        self.room = True

    def take(self, row: Row, now_s: float) -> bool:
        assert not self.ends, "a row after the end"
        if self.room:
            self.rows.append(row)
        return self.room

    def end(self, fault: JobFault | None) -> None:
        self.ends.append(fault)

    def ids(self, choice: int) -> list[int]:
        return [i for row in self.rows if row.choice == choice for i in row.ids]

    def texts(self, choice: int) -> list[Any]:
        return [text for row in self.rows if row.choice == choice for text in row.texts]


class Delivery:
    stream_seq = 1


class World(RuleBasedStateMachine):
    """One request. `copies`: messages that may be taken by a worker; `runs`: those that have been, by worker."""

    @initialize()
    def submit(self) -> None:
        self.judge = Judge(self)
        self.reader = Reader()
        self.judge.open(JobRecord("q", "p", CHOICES, self.reader, 0.0))
        self.copies: list[tuple[int, list[HistoryEntry]]] = [(1, [])]
        self.runs: dict[str, Run] = {}
        self.every: dict[int, Run] = {}  # also those that are gone, by number
        self.crashed: set[str] = set()
        self.frames: list[Frame] = []
        self.done: set[RunRef] = set()
        self.number = 0
        self.poison = 0

    # -- what the judge says -----------------------------------------------------------------------------------------

    def abort(self, worker: str, ref: RunRef) -> None:
        run = self.runs.get(worker)
        if run is not None and run.ref == ref:
            del self.runs[worker]

    def since(self, worker: str, item: SinceItem) -> None:
        run = self.runs.get(worker)
        if run is not None:
            self.frames.append(Frame(worker=worker, rows=run.rows_since(item.offsets)))

    def answer(self, worker: str, verdict: RunVerdict) -> None:
        if verdict.verdict == "done":
            self.done.add(RunRef(verdict.id, verdict.attempt, verdict.run))
        self.abort(worker, RunRef(verdict.id, verdict.attempt, verdict.run))

    def poisoned(self, _record: JobRecord, crashes: Sequence[Crash]) -> None:
        self.poison = len(crashes)

    # -- what happens ------------------------------------------------------------------------------------------------

    def _take(self, which: int) -> tuple[str, Run]:
        attempt, history = self.copies[which % len(self.copies)]
        self.number += 1
        worker = f"w{self.number}"
        envelope = Envelope(id="q", pool="p", model="m", judge="i", deadline=9e9, created=0.0, tokens=3, choices=CHOICES)
        run = Run(envelope=envelope, attempt=attempt, history=history, run=self.number, delivery=Delivery())  # type: ignore[arg-type]
        return worker, run

    @precondition(lambda self: len(self.runs) < 4)
    @rule(which=st.integers(0, 7))
    def start(self, which: int) -> None:
        """A worker gets a copy, the same one perhaps that another has got; a plain first attempt needs no claim."""
        worker, run = self._take(which)
        if run.attempt == 1 and not run.history:
            run.begin([], [])
            self._began(worker, run)
            return
        claim = Claim(id="q", attempt=run.attempt, run=run.run, worker=worker, history=run.history, group=1)
        reply = self.judge.on_claim(claim, 1.0, accounted=lambda name: name not in self.crashed, alive=self.runs.__contains__)
        if reply.verdict == "go":
            run.begin(reply.emitted, reply.finished)
            self._began(worker, run)

    def _began(self, worker: str, run: Run) -> None:
        run.state = RunState.RUNNING
        self.runs[worker] = self.every[run.run] = run

    def _step(self, worker: str, choice: int, count: int) -> Frame | None:
        run = self.runs[worker]
        log = run.choices[choice]
        if log.settled or log.fin is not None:
            return None
        places = range(len(log.ids), LENGTHS[choice])[:count]
        ids = [token(run.run, place) for place in places]
        fin = DONE if len(log.ids) + len(ids) == LENGTHS[choice] else None
        return Frame(worker=worker, rows=[run.append(choice, ids, [str(i) for i in ids], None, fin)])

    @precondition(lambda self: self.runs)
    @rule(
        steps=st.lists(
            st.tuples(st.integers(0, 3), st.integers(0, CHOICES - 1), st.integers(1, AT_ONCE)), min_size=1, max_size=4
        )
    )
    def say(self, steps: list[tuple[int, int, int]]) -> None:
        """Engines make steps; their frames are under way."""
        for which, choice, count in steps:
            frame = self._step(sorted(self.runs)[which % len(self.runs)], choice, count)
            if frame is not None:
                self.frames.append(frame)

    @precondition(lambda self: self.runs)
    @rule(which=st.integers(0, 3), choice=st.integers(0, CHOICES - 1), count=st.integers(1, AT_ONCE))
    def say_and_deliver(self, which: int, choice: int, count: int) -> None:
        """Nearly always a frame arrives at once."""
        frame = self._step(sorted(self.runs)[which % len(self.runs)], choice, count)
        if frame is not None:
            self.judge.on_frame(frame, 1.0)

    @precondition(lambda self: self.frames)
    @rule(order=st.lists(st.tuples(st.integers(0, 63), st.booleans()), min_size=1, max_size=6))
    def deliver(self, order: list[tuple[int, bool]]) -> None:
        """Any frames that are under way; kept, they come again."""
        for which, keep in order:
            if self.frames:
                at = which % len(self.frames)
                self.judge.on_frame(self.frames[at] if keep else self.frames.pop(at), 1.0)

    @precondition(lambda self: self.frames)
    @rule(which=st.integers(0, 63))
    def lose(self, which: int) -> None:
        del self.frames[which % len(self.frames)]

    @rule(which=st.integers(0, 7), blame=st.integers(0, 7))
    def move(self, which: int, blame: int) -> None:
        """Somebody believes that a copy's worker is gone, rightly or not, and writes down whom it suspects."""
        attempt, history = self.copies[which % len(self.copies)]
        if attempt < 5:
            self.copies.append((attempt + 1, [*history, HistoryEntry(attempt, f"w{blame + 1}")]))

    @precondition(lambda self: self.runs)
    @rule(which=st.integers(0, 7))
    def crash(self, which: int) -> None:
        worker = sorted(self.runs)[which % len(self.runs)]
        del self.runs[worker]
        self.crashed.add(worker)

    @precondition(lambda self: self.runs)
    @rule(which=st.integers(0, 7))
    def check(self, which: int) -> None:
        """A worker comes back from a lapse."""
        worker, run = sorted(self.runs.items())[which % len(self.runs)]
        verdict = self.judge.on_check(Check(worker=worker, runs=[run.ref]), 1.0).verdicts[0]
        if verdict != "current":
            del self.runs[worker]

    @rule(room=st.booleans())
    def reader(self, room: bool) -> None:
        self.reader.room = room
        if room:
            self.judge.resume_reading("q")

    @precondition(lambda self: self.number > 6)
    @rule(attempt=st.integers(1, 3))
    def refuse(self, attempt: int) -> None:
        self.judge.on_refuse(Refuse(id="q", attempt=attempt, fault=JobFault("deadline_exceeded", "too late")))

    # -- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def the_reader_has_a_beginning_of_what_the_current_run_says(self) -> None:
        record = self.judge.get("q")
        for choice in range(CHOICES):
            ids = self.reader.ids(choice)
            assert [i // 1000 for i in ids] == list(range(len(ids)))
            assert self.reader.texts(choice) == [str(i) for i in ids]
            if record is not None and record.run is not None:
                assert ids == self.every[record.run].choices[choice].ids[: len(ids)]

    @invariant()
    def it_ends_once_and_then_completely(self) -> None:
        assert len(self.reader.ends) <= 1
        assert bool(self.reader.ends) == (self.judge.get("q") is None)
        if self.reader.ends == [None]:
            assert tuple(len(self.reader.ids(choice)) for choice in range(CHOICES)) == LENGTHS
            assert len(self.done) == 1
        if self.poison:
            assert len(self.crashed) >= 3, "somebody who lives was counted"

    @invariant()
    def one_run_at_most_was_told_that_it_was_the_one(self) -> None:
        assert len(self.done) <= 1

    def teardown(self) -> None:
        """Whatever has happened, one more worker that is let be brings it to its end."""
        if not hasattr(self, "judge"):
            return
        self.frames.clear()
        self.reader.room = True
        self.judge.resume_reading("q")
        record = self.judge.get("q")
        if record is None:
            return
        self.copies = [(record.attempt + 1, [])]
        self.start(0)
        if self.judge.get("q") is not None:
            worker, run = max(self.runs.items(), key=lambda one: one[1].run)
            assert run.ref == RunRef("q", record.attempt, record.run or 0), "the newest claim has it"
            for choice in (0, 0, 1, 1):
                if worker in self.runs and (frame := self._step(worker, choice, AT_ONCE)) is not None:
                    self.judge.on_frame(frame, 1.0)
        assert self.reader.ends, "nobody brought it to its end"
        self.it_ends_once_and_then_completely()


World.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestFencing = World.TestCase
