"""What tests of the judge share: its port and a reader that keep what they are told, and messages to it."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.broker.messages.control import Claim, HistoryEntry, RunRef, RunVerdict, SinceItem
from headrace.broker.messages.events import JobEvent
from headrace.broker.messages.frames import Finish, Frame, JobFault, Row
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.judge import Judge
from headrace.broker.protocol.quarantine import Crash


class Port:
    def __init__(self) -> None:
        self.said: list[tuple[str, str, object]] = []
        self.poison: list[tuple[str, list[int]]] = []

    def abort(self, worker: str, ref: RunRef) -> None:
        self.said.append(("abort", worker, ref))

    def since(self, worker: str, item: SinceItem) -> None:
        self.said.append(("since", worker, item))

    def answer(self, worker: str, verdict: RunVerdict) -> None:
        self.said.append(("answer", worker, verdict))

    def poisoned(self, record: JobRecord, crashes: Sequence[Crash]) -> None:
        self.poison.append((record.id, [crash.group for crash in crashes]))


class Sink:
    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.ended: list[JobFault | None] = []
        self.room = True

    def take(self, row: Row, now_s: float) -> bool:
        if self.room:
            self.rows.append(row)
        return self.room

    def end(self, fault: JobFault | None) -> None:
        self.ended.append(fault)

    def ids(self, choice: int = 0) -> list[int]:
        return [i for row in self.rows if row.choice == choice for i in row.ids]


def opened(judge: Judge, choices: int = 1) -> Sink:
    sink = Sink()
    judge.open(JobRecord("q", "p", choices, sink, 0.0))
    return sink


def row(ids: list[int], *, offset: int = 0, attempt: int = 1, run: int = 7, choice: int = 0, fin: Finish | None = None) -> Row:
    return Row("q", attempt, run, choice, offset, ids, [str(i) for i in ids], None, fin)


def frame(judge: Judge, *rows: Row, worker: str = "w1", now: float = 1.0) -> None:
    judge.on_frame(Frame(worker=worker, rows=list(rows)), now)


def claim(
    judge: Judge,
    attempt: int = 2,
    run: int = 8,
    worker: str = "w2",
    history: list[HistoryEntry] | None = None,
    *,
    accounted: bool = False,
    alive: bool = False,
    group: int = 1,
    beside: bool = False,
    now: float = 1.0,
):
    return judge.on_claim(
        Claim(id="q", attempt=attempt, run=run, worker=worker, history=history or [], group=group, beside=beside),
        now,
        accounted=lambda _: accounted,
        alive=lambda _: alive,
    )


STOP = Finish(reason="stop")


def crash(judge: Judge, attempt: int, worker: str, group: int = 0) -> HistoryEntry:
    judge.on_event(JobEvent("started", "q", attempt, worker))
    return HistoryEntry(attempt, worker, group)
