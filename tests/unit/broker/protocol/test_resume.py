"""A request that is judged anew goes on from what the judge before it has recorded."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.broker.messages.control import Claim, HistoryEntry
from headrace.broker.messages.frames import Finish, Frame, Row
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.judge import Judge
from headrace.broker.protocol.resume import GENERATION, Resume
from tests.unit.broker.protocol.judge_bench import Port, Sink

CRASH = HistoryEntry(1002, "w", 4)
DONE = Finish(reason="stop")


class Recorder:
    def __init__(self) -> None:
        self.stored: set[HistoryEntry] = set()
        self.asked: list[list[HistoryEntry]] = []

    def recorded(self, crashes: Sequence[HistoryEntry]) -> bool:
        self.asked.append(list(crashes))
        return set(crashes) <= self.stored


def resumed(resume: Resume, choices: int = 2) -> tuple[Judge, JobRecord, Sink]:
    sink = Sink()
    record = JobRecord("q", "p", choices, sink, 0.0)
    record.restore(resume)
    judge = Judge(Port())
    judge.open(record)
    return judge, record, sink


def claim(judge: Judge, attempt: int, *, run: int = 7, worker: str = "new", history: Sequence[HistoryEntry] = ()) -> object:
    asked = Claim(id="q", attempt=attempt, run=run, worker=worker, history=list(history))
    return judge.on_claim(asked, 0.0, accounted=lambda _: False, alive=lambda _: True)


def test_a_run_is_told_what_was_emitted_and_which_choices_have_ended() -> None:
    judge, record, sink = resumed(Resume(emitted=[[1, 2], [3]], finished=[None, DONE]))
    reply = claim(judge, GENERATION)
    assert (reply.verdict, reply.emitted, reply.finished) == ("go", [[1, 2], [3]], [1])  # type: ignore[attr-defined]
    judge.on_frame(Frame(worker="new", rows=[Row("q", GENERATION, 7, 0, 2, [9], [""], fin=DONE)]), 1.0)
    assert [row.ids for row in sink.rows] == [[9]]
    assert judge.get("q") is None
    assert record.open_choices == 0


def test_no_first_frame_is_adopted_by_a_request_that_resumes() -> None:
    judge, record, sink = resumed(Resume(emitted=[[1], []], finished=[None, None]))
    judge.on_frame(Frame(worker="old", rows=[Row("q", 1, 7, 1, 0, [9], [""])]), 1.0)
    assert sink.rows == []
    assert record.run is None


def test_attempts_begin_above_all_that_are_in_the_history() -> None:
    assert Resume(emitted=[[]], finished=[None]).generation == 1
    assert Resume(emitted=[[]], finished=[None], history=[HistoryEntry(3, "w")]).generation == 1
    assert Resume(emitted=[[]], finished=[None], history=[CRASH]).generation == 2
    assert Resume(emitted=[[]], finished=[None]).fresh
    assert not Resume(emitted=[[]], finished=[None], history=[CRASH]).fresh


def test_crashes_that_were_recorded_count_again() -> None:
    judge, record, _ = resumed(Resume(emitted=[[], []], finished=[None, None], history=[CRASH]))
    assert claim(judge, 2 * GENERATION).crashes == 1  # type: ignore[attr-defined]
    assert record.evidence(record.crashes(lambda _: False)) == [CRASH]


def test_a_claim_waits_until_the_crashes_before_it_are_stored() -> None:
    judge, record, _ = resumed(Resume(emitted=[[], []], finished=[None, None]))
    record.recorder = recorder = Recorder()
    assert claim(judge, GENERATION, run=1, worker="w").verdict == "go"  # type: ignore[attr-defined]
    crash = HistoryEntry(GENERATION, "w", 2)
    assert claim(judge, GENERATION + 1, run=2, history=[crash]).verdict == "wait"  # type: ignore[attr-defined]
    assert record.run == 1
    assert recorder.asked == [[crash]]
    recorder.stored.add(crash)
    assert claim(judge, GENERATION + 1, run=2, history=[crash]).verdict == "go"  # type: ignore[attr-defined]
    assert record.run == 2


def test_the_testimony_of_an_engines_death_keeps_its_mark() -> None:
    judge, record, _ = resumed(Resume(emitted=[[], []], finished=[None, None]))
    told = HistoryEntry(GENERATION, "w#engine", 2)
    claim(judge, GENERATION + 1, history=[told, HistoryEntry(GENERATION, "w", 1)])
    assert record.evidence(record.crashes(lambda _: False)) == [told]
