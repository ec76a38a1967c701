"""Which batch runs make way for interactive work, and that every job gets on all the same."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.messages.requests import Envelope
from headrace.broker.protocol.judge import GENERATION
from headrace.broker.protocol.preemption import blocks_of, choose, lost_tokens, may_yield, moves_of
from headrace.broker.protocol.run import Run
from tests.unit.broker.protocol.test_protocol_runs import FakeDelivery

MOST = 4


def batch_run(
    seq: int = 1, *, attempt: int = 1, made: int = 0, tokens: int = 100, choices: int = 1, request_class: str = "batch"
) -> Run:
    envelope = Envelope(
        id=f"q{seq}",
        pool="p",
        model="m",
        judge="i",
        deadline=9e9,
        created=0.0,
        tokens=tokens,
        choices=choices,
        request_class=request_class,
    )
    run = Run(envelope=envelope, attempt=attempt, history=[], run=seq, delivery=FakeDelivery(seq))
    run.begin([], [])
    run.start()
    for choice in range(choices):
        if made:
            run.append(choice, [7] * made, [""] * made, None, None)
    return run


def chosen(runs: list[Run], *, slots: int = 0, blocks: int = 0) -> list[str]:
    return [run.id for run in choose(runs, slots=slots, blocks=blocks, block_size=16, resumable=lambda _: True)]


def test_only_batch_runs_that_can_be_continued_elsewhere_make_way() -> None:
    assert may_yield(batch_run(), MOST)
    assert not may_yield(batch_run(request_class="std"), MOST)
    kept = batch_run()
    kept.kept = True
    assert not may_yield(kept, MOST)
    suspect = batch_run()
    suspect.limit = 3
    assert not may_yield(suspect, MOST)
    ended, lapsed = batch_run(), batch_run()
    ended.end(0.0)
    lapsed.lapse()
    assert not may_yield(ended, MOST)
    assert not may_yield(lapsed, MOST)


def test_the_moves_of_a_job_count_inside_its_generation() -> None:
    assert [moves_of(attempt) for attempt in (1, 2, 5, GENERATION, GENERATION + 3, 2 * GENERATION)] == [0, 1, 4, 0, 3, 0]


def test_a_job_that_was_moved_often_enough_stays() -> None:
    assert [may_yield(batch_run(attempt=attempt), MOST) for attempt in (1, MOST, MOST + 1)] == [True, True, False]


def test_the_run_that_loses_least_goes_first() -> None:
    far, begun, waiting = batch_run(1, made=50), batch_run(2, made=1), batch_run(3)
    assert [lost_tokens(run) for run in (far, begun, waiting)] == [150, 101, 0]
    assert chosen([far, begun, waiting], slots=2) == ["q3", "q2"]


def test_a_run_is_preempted_again_only_when_all_others_have_been_as_often() -> None:
    assert chosen([batch_run(1, attempt=2), batch_run(2, made=50)], slots=1) == ["q2"]


def test_slots_and_blocks_are_both_freed() -> None:
    runs = [batch_run(1, made=1, tokens=31), batch_run(2, made=2, tokens=31, choices=2)]
    assert [blocks_of(run, 16) for run in runs] == [2, 6]
    assert chosen(runs, blocks=2) == ["q1"]
    assert chosen(runs, blocks=3) == ["q1", "q2"]
    assert chosen(runs, slots=1, blocks=8) == ["q1", "q2"]
    assert chosen(runs) == []


def test_a_run_that_no_other_worker_could_continue_stays() -> None:
    one, other = batch_run(1), batch_run(2, made=9)
    assert choose([one, other], slots=1, blocks=0, block_size=0, resumable=lambda run: run is other) == [other]


@given(st.lists(st.integers(0, 7), min_size=1, max_size=400), st.integers(1, 8))
def test_no_sequence_of_demands_preempts_a_job_too_often_or_one_much_more_than_others(demands: list[int], jobs: int) -> None:
    """Each demand takes a slot while all run; a preempted job comes back at once, as its next attempt."""
    attempts = dict.fromkeys(range(jobs), 1)
    preempted: Counter[int] = Counter()
    for made in demands:
        runs = [batch_run(job, attempt=attempt, made=(made + job) % 5) for job, attempt in attempts.items()]
        candidates = [run for run in runs if may_yield(run, MOST)]
        for run in choose(candidates, slots=1, blocks=0, block_size=16, resumable=lambda _: True):
            job = int(run.id[1:])
            preempted[job] += 1
            attempts[job] += 1
        counts = [preempted[job] for job in attempts]
        assert max(counts) <= MOST
        assert max(counts) - min(counts) <= 1


def test_in_the_engine_a_batch_run_comes_behind_every_other_one() -> None:
    first, last = batch_run(1), batch_run(2, request_class="std")
    last.envelope = msgspec.structs.replace(last.envelope, priority=2**31 - 1)
    assert first.engine_priority > last.engine_priority
