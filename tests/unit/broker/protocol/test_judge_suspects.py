"""The judge's rules for jobs whose workers died: crashes that count, groups, promises, clearance and poison."""

from __future__ import annotations

import pytest

from headrace.broker.messages.control import Check, HistoryEntry, RunRef, SuspicionQuery
from headrace.broker.messages.events import JobEvent
from headrace.broker.protocol.judge import Judge
from tests.unit.broker.protocol.judge_bench import Port, claim, crash, frame, opened, row


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
        ((2.0, 2.25, 2.5), True),
        ((2.0, 2.2, 2.4), False),  # not for half a second
        ((2.0,), False),
        ((2.0, 9.0), True),
        ((), False),
    ],
)
def test_a_run_that_goes_on_clears_its_job(judge: Judge, at: tuple[float, ...], *, cleared: bool) -> None:
    opened(judge)
    history = [crash(judge, n, f"w{n}", 25) for n in (1, 2)]
    assert claim(judge, 3, 8, "w3", history, group=5).clear_s == 0.5
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
    assert clear_s == [0.5, 0.5, 1.0, 2.0, 2.0, 2.0]
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
