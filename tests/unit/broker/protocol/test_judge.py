"""The judge's rules for rows, claims and ends, one behaviour at a time. Under random faults they are in tests/simulation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.messages.control import Check, Refuse, RunRef, RunVerdict, SinceItem
from headrace.broker.messages.frames import Finish, JobFault
from headrace.broker.protocol.judge import Judge
from headrace.broker.protocol.resume import GENERATION
from tests.unit.broker.protocol.judge_bench import STOP, Port, claim, frame, opened, row


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
