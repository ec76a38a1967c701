"""The judge's rules, one behaviour at a time. The rules under random faults are in tests/simulation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.messages import (
    Check,
    Claim,
    Finish,
    Frame,
    HistoryEntry,
    JobEvent,
    JobFault,
    Refuse,
    Row,
    RunRef,
    RunVerdict,
    SinceItem,
    SuspicionQuery,
)
from headrace.broker.protocol.crashes import Crash
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.judge import Judge
from headrace.broker.protocol.resume import GENERATION


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

    def take(self, row: Row) -> bool:
        if self.room:
            self.rows.append(row)
        return self.room

    def end(self, fault: JobFault | None) -> None:
        self.ended.append(fault)

    def ids(self, choice: int = 0) -> list[int]:
        return [i for row in self.rows if row.choice == choice for i in row.ids]


@pytest.fixture
def port() -> Port:
    return Port()


@pytest.fixture
def judge(port: Port) -> Judge:
    return Judge(port)


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


def test_the_first_frame_adopts_its_run_and_tokens_arrive_in_order(judge: Judge, port: Port) -> None:
    sink = opened(judge)
    frame(judge, row([1, 2]), row([3], offset=2))
    assert sink.ids() == [1, 2, 3]
    assert port.said == []


def test_a_frame_of_another_run_is_dropped_and_that_run_aborted_at_its_worker_only(judge: Judge, port: Port) -> None:
    sink = opened(judge)
    frame(judge, row([1]))
    frame(judge, row([9], run=99), worker="other")
    assert sink.ids() == [1]
    assert port.said == [("abort", "other", RunRef("q", 1, 99))]


def test_a_frame_of_a_higher_attempt_is_not_adopted_without_a_claim(judge: Judge, port: Port) -> None:
    sink = opened(judge)
    frame(judge, row([1], attempt=2, run=5))
    assert sink.ids() == []
    assert port.said == [("abort", "w1", RunRef("q", 2, 5))]


def test_an_overlap_is_trimmed(judge: Judge) -> None:
    sink = opened(judge)
    frame(judge, row([1, 2, 3]))
    frame(judge, row([2, 3, 4], offset=1))
    assert sink.ids() == [1, 2, 3, 4]
    assert sink.rows[-1].texts == ["4"]


def test_a_gap_is_asked_after_and_nothing_is_delivered_out_of_order(judge: Judge, port: Port) -> None:
    sink = opened(judge)
    frame(judge, row([1]))
    frame(judge, row([4], offset=3))
    assert sink.ids() == [1]
    assert port.said == [("since", "w1", SinceItem("q", [1]))]


def test_the_end_is_confirmed_once_and_a_repeated_last_frame_is_told_so(judge: Judge, port: Port) -> None:
    sink = opened(judge)
    frame(judge, row([1], fin=STOP))
    assert sink.ended == [None]
    assert port.said == [("answer", "w1", RunVerdict("q", 1, 7, "done"))]
    frame(judge, row([], offset=1, fin=STOP))
    assert port.said[1:] == [("answer", "w1", RunVerdict("q", 1, 7, "unknown"))]
    assert sink.ended == [None]


def test_a_request_ends_only_when_every_choice_has_ended(judge: Judge, port: Port) -> None:
    sink = opened(judge, choices=2)
    frame(judge, row([1], fin=STOP), row([2], choice=1))
    assert sink.ended == []
    frame(judge, row([3], choice=1, offset=1, fin=STOP))
    assert sink.ended == [None]
    assert sink.ids(1) == [2, 3]


def test_a_fault_in_one_choice_ends_the_whole_request(judge: Judge) -> None:
    sink = opened(judge, choices=2)
    fault = JobFault("engine_error", "boom")
    frame(judge, row([], fin=Finish(reason="error", fault=fault)))
    assert sink.ended == [fault]
    assert len(judge) == 0


def test_a_choice_outside_the_request_is_fenced_off(judge: Judge, port: Port) -> None:
    sink = opened(judge)
    frame(judge, row([1], choice=5))
    assert sink.rows == []
    assert port.said[0][0] == "abort"


def test_a_full_reader_pauses_its_stream_and_is_given_everything_once_it_has_room(judge: Judge, port: Port) -> None:
    sink = opened(judge)
    frame(judge, row([1]))
    sink.room = False
    frame(judge, row([2], offset=1))
    frame(judge, row([3], offset=2))
    assert port.said == []  # nothing is asked for while nobody reads
    sink.room = True
    judge.resume_reading("q")
    assert port.said == [("since", "w1", SinceItem("q", [1]))]
    frame(judge, row([2, 3], offset=1))
    assert sink.ids() == [1, 2, 3]


def test_a_claim_sets_the_fence_before_any_frame(judge: Judge, port: Port) -> None:
    sink = opened(judge)
    frame(judge, row([1, 2]))
    reply = claim(judge)
    assert (reply.verdict, reply.emitted) == ("go", [[1, 2]])
    assert port.said == [("abort", "w1", RunRef("q", 1, 7))]
    frame(judge, row([3], offset=2))  # the old run, late
    assert sink.ids() == [1, 2]
    frame(judge, row([3], offset=2, attempt=2, run=8), worker="w2")
    assert sink.ids() == [1, 2, 3]


def test_a_claim_of_an_old_attempt_or_of_the_same_under_another_run_is_stale(judge: Judge) -> None:
    opened(judge)
    assert claim(judge, attempt=3, run=8).verdict == "go"
    assert claim(judge, attempt=2, run=9).verdict == "stale"
    assert claim(judge, attempt=3, run=9).verdict == "stale"
    assert claim(judge, attempt=3, run=8).verdict == "go", "a retried claim keeps its run"


def test_a_claim_for_an_ended_request_is_unknown(judge: Judge) -> None:
    opened(judge)
    frame(judge, row([1], fin=STOP))
    assert claim(judge).verdict == "unknown"


def test_finished_choices_are_not_run_again(judge: Judge) -> None:
    opened(judge, choices=2)
    frame(judge, row([1], fin=STOP), row([2], choice=1))
    assert claim(judge).finished == [0]


def crash(judge: Judge, attempt: int, worker: str, group: int = 0) -> HistoryEntry:
    judge.on_event(JobEvent("started", "q", attempt, worker))
    return HistoryEntry(attempt, worker, group)


def test_a_job_that_crashes_alone_in_the_end_is_poison_with_its_history(judge: Judge, port: Port) -> None:
    sink = opened(judge)
    history = [crash(judge, n, f"w{n}", 25) for n in (1, 2)]
    reply = claim(judge, attempt=3, run=1, worker="w3", history=history, group=5)
    assert (reply.verdict, reply.crashes, reply.limit) == ("go", 2, 5)
    history.append(HistoryEntry(3, "w3", 9))  # four of them only waited there
    assert claim(judge, attempt=4, run=2, worker="w4", history=history, group=5).verdict == "wait"
    assert claim(judge, attempt=4, run=2, worker="w4", history=history, group=1).verdict == "go"
    history.append(HistoryEntry(4, "w4", 3))
    assert claim(judge, attempt=5, run=3, history=history).verdict == "unknown"
    assert port.poison == [("q", [25, 25, 5, 1])]
    assert sink.ended[0] is not None
    assert sink.ended[0].code == "poison"
    assert "among 25, 25, 5 and 1 of their jobs" in sink.ended[0].message


def test_a_job_beside_others_is_never_convicted(judge: Judge, port: Port) -> None:
    opened(judge)
    history = [crash(judge, n, f"w{n}", 25) for n in (1, 2)]
    for attempt in range(3, 9):
        worker = f"w{attempt}"
        assert claim(judge, attempt, attempt, worker, history, group=1, beside=True).verdict == "go"
        history.append(HistoryEntry(attempt, worker, 30))
    assert port.poison == []


def run_on(judge: Judge, *, run: int, attempt: int, worker: str, start: int, at: tuple[float, ...]) -> None:
    """Frames of five tokens, at these times."""
    for n, now in enumerate(at):
        frame(judge, row([9] * 5, offset=start + 5 * n, attempt=attempt, run=run), worker=worker, now=now)


@pytest.mark.parametrize(
    ("at", "cleared"),
    [
        ((2.0, 2.5, 3.0), True),
        ((2.0, 2.5, 2.9), False),  # not for a second
        ((2.0,), False),
        ((2.0, 9.0), True),
        ((), False),
    ],
)
def test_a_run_that_goes_on_clears_its_job(judge: Judge, at: tuple[float, ...], *, cleared: bool) -> None:
    opened(judge)
    history = [crash(judge, n, f"w{n}", 25) for n in (1, 2)]
    assert claim(judge, 3, 8, "w3", history, group=5).clear_s == 1.0
    run_on(judge, run=8, attempt=3, worker="w3", start=0, at=at)
    query = SuspicionQuery(id="q", history=history)
    suspicion = judge.on_suspicion(query, accounted=lambda _: False)
    assert (suspicion.limit, suspicion.crashes) == ((0, 0) if cleared else (5, 2))


def test_a_job_with_few_tokens_more_is_not_cleared_however_long_they_take(judge: Judge) -> None:
    opened(judge)
    history = [crash(judge, n, f"w{n}", 25) for n in (1, 2)]
    claim(judge, 3, 8, "w3", history, group=5)
    frame(judge, row([1] * 3, attempt=3, run=8), worker="w3", now=2.0)
    frame(judge, row([1] * 4, offset=3, attempt=3, run=8), worker="w3", now=60.0)
    assert judge.on_suspicion(SuspicionQuery(id="q"), accounted=lambda _: False).crashes == 2


def test_a_stream_whose_reader_is_full_is_cleared_all_the_same(judge: Judge) -> None:
    sink = opened(judge)
    history = [crash(judge, n, f"w{n}", 25) for n in (1, 2)]
    claim(judge, 3, 8, "w3", history, group=5)
    sink.room = False
    run_on(judge, run=8, attempt=3, worker="w3", start=0, at=(2.0, 2.5, 3.0))
    assert judge.on_suspicion(SuspicionQuery(id="q"), accounted=lambda _: False).crashes == 0


def test_what_was_promised_for_a_run_that_is_cleared_holds_no_longer(judge: Judge) -> None:
    """Its worker may run others beside it from then on: its crash is not one of a job alone."""
    opened(judge)
    history = [crash(judge, n, f"w{n}", 4) for n in (1, 2)]
    assert claim(judge, 3, 8, "w3", history).limit == 1
    run_on(judge, run=8, attempt=3, worker="w3", start=0, at=(2.0, 2.5, 3.0))
    history.append(HistoryEntry(3, "w3", 30))
    reply = claim(judge, 4, 9, "w4", history, group=0)
    assert (reply.verdict, reply.crashes, reply.limit) == ("go", 1, 0)
    assert [c.group for c in judge.get("q").crashes(lambda _: False)] == [30]  # type: ignore[union-attr]


def test_a_job_that_crashes_again_and_again_in_between_takes_ever_longer_to_be_cleared(judge: Judge, port: Port) -> None:
    """Each time 1.5 seconds after it has begun again: from the fourth clearance on that is too soon."""
    opened(judge)
    history: list[HistoryEntry] = [crash(judge, 1, "w1", 20)]
    clear_s = []
    for attempt in range(2, 12):
        now, worker = 10.0 * attempt, f"w{attempt}"
        reply = claim(judge, attempt, attempt, worker, history, group=1, now=now)
        if reply.verdict == "unknown":
            break
        clear_s.append(reply.clear_s)
        start = 15 * (attempt - 2)
        run_on(judge, run=attempt, attempt=attempt, worker=worker, start=start, at=(now, now + 0.7, now + 1.5))
        history.append(HistoryEntry(attempt, worker, 20))
    assert clear_s == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert port.poison == [("q", [20, 20, 1, 1])]


def test_an_unknown_request_is_no_suspect(judge: Judge) -> None:
    assert judge.on_suspicion(SuspicionQuery(id="q"), accounted=lambda _: False).limit == 0


def test_a_named_request_is_tried_alone_after_the_first_death_and_is_poison_after_the_second(judge: Judge, port: Port) -> None:
    opened(judge)
    frame(judge, row([1]))
    history = [HistoryEntry(1, "w1#named", 1)]
    assert claim(judge, 2, 8, "w2", history, group=0).limit == 1
    assert claim(judge, 2, 8, "w2", history, group=1).verdict == "go"
    history.append(HistoryEntry(2, "w2#named", 1))
    assert claim(judge, 3, 9, "w3", history).verdict == "unknown"
    assert port.poison == [("q", [1, 1])]


def test_suspicions_the_judge_cannot_confirm_do_not_count(judge: Judge) -> None:
    opened(judge)
    never_had_it = [HistoryEntry(n, f"x{n}") for n in (1, 2, 3)]
    assert claim(judge, attempt=4, history=never_had_it).crashes == 0


def test_workers_that_came_back_or_drained_do_not_count_but_a_dead_engine_does(judge: Judge) -> None:
    opened(judge)
    history = [crash(judge, n, f"w{n}") for n in (1, 2)]
    assert claim(judge, attempt=3, run=1, history=history, accounted=True).crashes == 0
    engine = [HistoryEntry(1, "w1#engine")]
    assert claim(judge, attempt=4, run=2, history=engine, accounted=True).crashes == 1


def test_the_death_of_an_engine_counts_also_when_its_last_frames_come_late(judge: Judge) -> None:
    opened(judge)
    frame(judge, row([1]))
    engine = [HistoryEntry(1, "w1#engine")]
    assert claim(judge, attempt=2, run=8, history=engine, alive=True, accounted=True).crashes == 1
    frame(judge, row([2], offset=1))  # overtaken by the claim
    assert claim(judge, attempt=3, run=9, history=engine, accounted=True).crashes == 1


def test_a_crashed_worker_is_not_spared_because_a_slow_view_still_shows_its_lease(judge: Judge) -> None:
    opened(judge)
    frame(judge, row([1]))
    suspicion = [HistoryEntry(1, "w1")]
    assert claim(judge, attempt=2, run=8, history=suspicion, alive=True).crashes == 1
    assert claim(judge, attempt=3, run=9, history=suspicion).crashes == 1


def test_a_worker_that_comes_back_and_is_told_that_its_run_is_stale_never_counts_for_it(judge: Judge) -> None:
    opened(judge)
    frame(judge, row([1]))
    suspicion = [HistoryEntry(1, "w1")]
    assert claim(judge, attempt=2, run=8, worker="w2", history=suspicion).crashes == 1
    assert judge.on_check(Check(worker="w1", runs=[RunRef("q", 1, 7)]), 1.0).verdicts == ["stale"]
    judge.on_event(JobEvent("started", "q", 1, "w1"))  # doubled, late
    assert claim(judge, attempt=3, run=9, history=suspicion).crashes == 0


def test_a_suspect_is_given_only_to_a_worker_that_promises_a_small_enough_group(judge: Judge) -> None:
    opened(judge)
    history = [crash(judge, n, f"w{n}", 15) for n in (1, 2)]
    for group in (0, 4):
        refused = claim(judge, attempt=3, run=8, worker="w3", history=history, group=group)
        assert (refused.verdict, refused.crashes, refused.limit) == ("wait", 2, 3)
    third = [*history, HistoryEntry(3, "w3", 15)]
    reply = claim(judge, attempt=4, run=9, history=third, group=3)
    assert (reply.verdict, reply.crashes) == ("go", 2), "it crashed of something else while this one waited"


def test_the_same_worker_twice_is_one_crash(judge: Judge) -> None:
    opened(judge)
    history = [crash(judge, 1, "w1"), crash(judge, 2, "w1")]
    assert claim(judge, attempt=3, history=history).crashes == 1


def test_histories_of_stale_claims_count_too(judge: Judge) -> None:
    opened(judge)
    entries = [crash(judge, n, f"w{n}") for n in (1, 2)]
    assert claim(judge, attempt=5, run=1, history=entries[:1]).crashes == 1
    assert claim(judge, attempt=2, run=2, history=entries[1:]).verdict == "stale"
    assert claim(judge, attempt=6, run=3).crashes == 2


def test_a_worker_superseded_alive_never_counts_for_that_attempt(judge: Judge) -> None:
    opened(judge)
    frame(judge, row([1]))
    claim(judge, attempt=2, run=8, worker="w2", alive=True)
    assert claim(judge, attempt=3, run=9, worker="w3", history=[HistoryEntry(1, "w1")]).crashes == 0


def test_a_check_of_the_first_attempt_adopts_like_a_first_frame(judge: Judge) -> None:
    opened(judge)
    check = Check(worker="w1", runs=[RunRef("q", 1, 7), RunRef("q", 1, 8), RunRef("gone", 1, 1)])
    assert judge.on_check(check, 1.0).verdicts == ["current", "stale", "unknown"]


def test_a_refusal_is_the_end_unless_a_run_is_current(judge: Judge) -> None:
    sink = opened(judge)
    fault = JobFault("shed", "no room", retry_after_s=2.0)
    frame(judge, row([1]))
    assert judge.on_refuse(Refuse(id="q", attempt=1, fault=fault)).verdict == "stale"
    assert judge.on_refuse(Refuse(id="q", attempt=2, fault=fault)).verdict == "done"
    assert judge.on_refuse(Refuse(id="q", attempt=3, fault=fault)).verdict == "unknown"
    assert sink.ended == [fault]


def test_after_a_lapse_every_open_request_gets_an_attempt_above_all_copies(judge: Judge) -> None:
    opened(judge)
    claim(judge, attempt=5, run=1)
    assert [(r.id, attempt) for r, attempt in judge.on_lapse()] == [("q", GENERATION)]
    assert [attempt for _, attempt in judge.on_lapse()] == [2 * GENERATION]


def test_silent_streams_are_reported_once_per_period(judge: Judge) -> None:
    opened(judge)
    assert judge.silent(1.0, 1.5) == []
    assert [r.id for r in judge.silent(2.0, 1.5)] == ["q"]
    assert judge.silent(2.5, 1.5) == []


def test_an_open_id_cannot_be_opened_again(judge: Judge) -> None:
    opened(judge)
    with pytest.raises(ValueError, match="open already"):
        opened(judge)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=40), st.randoms(use_true_random=False))
def test_any_pieces_in_any_order_give_a_prefix_without_a_gap_or_a_repeat(cuts: list[tuple[int, int]], rng) -> None:
    judge = Judge(Port())
    sink = opened(judge)
    text = list(range(12))
    for a, b in cuts:
        frame(judge, row(text[min(a, b) : max(a, b)], offset=min(a, b)))
    assert sink.ids() == text[: len(sink.ids())]
