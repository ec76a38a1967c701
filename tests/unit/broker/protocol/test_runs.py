"""Who may start on a trial worker, and under which promise."""

from __future__ import annotations

from headrace.broker.protocol.run import Run, RunState
from headrace.broker.protocol.runs import LONGEST_S, RunTable, Turn, alone_after_s
from tests.unit.broker.protocol.test_protocol_runs import make


def suspect(table: RunTable, seq: int, limit: int, *, crashes: int = 2, state: RunState = RunState.WAITING) -> Run:
    run = make(seq, request_id=f"s{seq}", attempt=3)
    run.state = state
    table.add(run)
    table.suspect(run, limit, crashes)
    return run


def ordinary(table: RunTable, seq: int, *, cleared: bool = False) -> Run:
    run = make(seq, request_id=f"o{seq}")
    run.state = RunState.RUNNING
    run.cleared = cleared
    table.add(run)
    return run


def test_as_many_start_together_as_the_smallest_limit_allows() -> None:
    table = RunTable()
    first, second, third = suspect(table, 1, 2), suspect(table, 2, 3), suspect(table, 3, 3)
    assert table.turn(first) == Turn(2)
    first.claim()
    assert table.turn(second) == Turn(3)
    second.claim()
    assert table.turn(third) is None
    table.clear(first)
    assert table.turn(third, overdue=True) == Turn(3, beside=True)
    third.claim()
    assert table.turn(suspect(table, 4, 2)) is None, "two run already, and its own limit is smaller"


def test_the_most_suspect_goes_first() -> None:
    table = RunTable()
    late, often, small = suspect(table, 1, 4), suspect(table, 2, 4, crashes=3), suspect(table, 3, 1)
    assert [table.turn(run) is not None for run in (late, often, small)] == [False, False, True]
    table.remove(small)
    assert [table.turn(run) is not None for run in (late, often)] == [False, True]


def test_a_suspect_waits_for_ordinary_co_runners_until_it_is_overdue() -> None:
    table = RunTable()
    ordinary(table, 1)
    for limit in (1, 4):
        run = suspect(table, 10 + limit, limit)
        assert table.turn(run) is None
        assert table.turn(run, overdue=True) == Turn(limit, beside=True)
        table.remove(run)


def test_cleared_co_runners_keep_only_one_waiting_that_is_to_run_alone() -> None:
    table = RunTable()
    ordinary(table, 1, cleared=True)
    run = suspect(table, 2, 4)
    assert table.turn(run) == Turn(4, beside=True)
    table.suspect(run, 1, 3)
    assert table.turn(run) is None
    assert table.turn(run, overdue=True) == Turn(1, beside=True)


def test_on_the_only_worker_those_that_may_have_company_start_at_once_and_hold_nothing_up() -> None:
    table = RunTable()
    table.alone = True
    ordinary(table, 1)
    waiting = suspect(table, 10, 4)
    assert not table.on_trial, "it starts beside the other in any case"
    assert table.turn(waiting) == Turn(4, beside=True)
    waiting.claim(beside=True)
    assert not table.on_trial
    table.alone = False
    assert table.on_trial


def test_on_the_only_worker_nothing_starts_beside_suspects_that_were_promised_to_be_apart() -> None:
    table = RunTable()
    table.alone = True
    apart = suspect(table, 10, 4)
    late = make(20, request_id="o20")
    table.add(late)
    assert table.turn(apart) == Turn(4)
    apart.claim()
    assert table.on_trial
    assert table.turn(late) is None


def test_on_the_only_worker_a_suspect_that_is_to_run_alone_holds_the_others_back() -> None:
    table = RunTable()
    table.alone = True
    ordinary(table, 1)
    run = suspect(table, 10, 1)
    assert table.on_trial
    assert table.turn(run) is None
    assert table.turn(run, overdue=True) == Turn(1, beside=True)


def test_patience_is_the_usual_one_up_to_the_third_crash_and_bounded() -> None:
    assert [alone_after_s(crashes, 2.0) for crashes in range(2, 8)] == [2.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    assert alone_after_s(50, 2.0) == LONGEST_S
    assert alone_after_s(50, 2 * LONGEST_S) == 2 * LONGEST_S, "a longer setting is kept"
