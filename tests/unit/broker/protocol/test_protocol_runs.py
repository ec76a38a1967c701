"""The worker's run table: keyed by stored sequence, exact in what it sends again."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.messages.control import HistoryEntry
from headrace.broker.messages.frames import Finish, TokenLogprob
from headrace.broker.messages.requests import Envelope
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.protocol.runs import ORDINARY, RunTable, Tombstones


@dataclass(eq=False)
class FakeDelivery:
    """Only what the table looks at."""

    stream_seq: int
    num_delivered: int = 1
    data: bytes = b""
    subject: str = ""
    pending: int = 0
    stored: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    acked: int = 0

    def ack(self) -> None:
        self.acked += 1

    def nak(self, delay_s: float = 0.0) -> None: ...
    def progress(self) -> None: ...
    def term(self, reason: str = "") -> None: ...


def make(
    seq: int = 1, *, request_id: str = "q", attempt: int = 1, choices: int = 1, history: list[HistoryEntry] | None = None
) -> Run:
    envelope = Envelope(id=request_id, pool="p", model="m", judge="i", deadline=9e9, created=0.0, tokens=3, choices=choices)
    return Run(envelope=envelope, attempt=attempt, history=history or [], run=seq * 10, delivery=FakeDelivery(seq))


def test_a_sequence_has_one_run() -> None:
    table = RunTable()
    run = make(5)
    table.add(run)
    assert table.at(5) is run
    assert table.at(6) is None
    with pytest.raises(ValueError, match="sequence 5"):
        table.add(make(5))


def test_a_run_is_forgotten_once() -> None:
    table = RunTable()
    run = make()
    table.add(run)
    assert table.remove(run)
    assert not table.remove(run)
    assert len(table) == 0
    assert table.of("q") == []


def test_runs_of_one_request_are_told_apart_by_attempt_and_run() -> None:
    table = RunTable()
    first, second = make(1), make(2, attempt=2)
    table.add(first)
    table.add(second)
    assert table.find(second.ref) is second
    table.remove(first)
    assert table.of("q") == [second]


def test_ordinary_runs_do_not_start_while_suspects_run_or_wait() -> None:
    table = RunTable()
    hot = make(2, request_id="b", history=[HistoryEntry(1, "x"), HistoryEntry(2, "y")])
    late = make(3, request_id="c")
    table.add(late)
    assert table.turn(late) == ORDINARY
    table.add(hot)
    assert (table.on_trial, table.group_limit) == (True, 12), "a group of unknown size counts as one of 64"
    assert table.turn(late) is None, "or the suspect would wait for ever on a busy worker"
    hot.state = RunState.RUNNING
    assert table.turn(late) is None
    table.clear(hot)
    assert table.turn(late) == ORDINARY
    assert (table.on_trial, table.group_limit, hot.cleared) == (False, 0, True)


def test_suspects_are_in_the_order_in_which_they_became_suspects() -> None:
    table = RunTable()
    runs = [make(seq, request_id=f"q{seq}") for seq in range(1, 33)]
    for run in runs:
        table.add(run)
    late, *others = runs
    for run in (*reversed(others), late):
        table.suspect(run, 4, 1)
    assert table.suspects == [*reversed(others), late]


def test_a_suspect_that_leaves_ends_the_trial() -> None:
    table = RunTable()
    hot = make(2, history=[HistoryEntry(1, "x"), HistoryEntry(2, "y")])
    table.add(hot)
    hot.move()
    assert not table.on_trial
    table.remove(hot)
    assert table.suspects == []


def test_only_what_the_engine_has_not_finished_is_in_the_engine() -> None:
    run = make()
    run.begin([], [])
    run.state = RunState.CLAIMING
    assert not run.in_engine
    run.state = RunState.RUNNING
    assert run.in_engine
    run.append(0, [1], ["a"], None, Finish(reason="stop"))
    assert not run.in_engine


def test_rows_since_repeat_exactly_what_is_missing_with_the_end() -> None:
    run = make(choices=2)
    run.begin([], [])
    run.append(0, [1], ["a"], [TokenLogprob(1, b"a", -0.5)], None)
    run.append(0, [2, 3], ["b", "c"], [TokenLogprob(2, b"b", -1.0), TokenLogprob(3, b"c", -2.0)], Finish(reason="stop"))
    (row,) = run.rows_since([1, 0])
    assert (row.offset, row.ids, row.texts, [p.id for p in row.logprobs or []]) == (1, [2, 3], ["b", "c"], [2, 3])
    assert row.fin is not None
    (end,) = run.rows_since([3, 0])
    assert (end.offset, end.ids) == (3, [])
    assert not run.complete
    run.append(1, [], [], None, Finish(reason="length"))
    assert run.complete


def test_a_resumed_run_continues_at_the_emitted_offset_and_never_repeats_its_text() -> None:
    run = make(attempt=2, choices=2)
    run.begin([[1, 2], [5]], [1])
    assert run.resumed
    row = run.append(0, [3], ["c"], None, None)
    assert row.offset == 2
    (again,) = run.rows_since([0, 0])
    assert (again.offset, again.ids, again.texts) == (2, [3], ["c"])
    run.append(0, [], [], None, Finish(reason="stop"))
    assert run.complete, "choice 1 was finished by an earlier attempt"


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), max_size=10), st.integers(0, 40))
def test_rows_since_any_offset_completes_the_sequence(steps: list[list[int]], have: int) -> None:
    run = make()
    run.begin([], [])
    everything: list[int] = []
    for ids in steps:
        run.append(0, ids, [str(i) for i in ids], None, None)
        everything += ids
    have = min(have, len(everything))
    rows = run.rows_since([have])
    got = [i for row in rows for i in row.ids]
    assert everything[:have] + got == everything


def test_tombstones_expire_and_are_bounded() -> None:
    stones = Tombstones(keep_s=60, limit=2)
    for n, name in enumerate("abc"):
        stones.add(name, float(n))
    assert "a" not in stones
    assert "b" in stones
    stones.expire(61.5)
    assert "b" not in stones
    assert "c" in stones


def test_the_tombstone_of_a_job_covers_all_of_its_runs() -> None:
    stones = Tombstones(keep_s=1.0)
    stones.add("job", 0.0)
    assert "job~nonce" in stones
    assert "job~nonce-1" in stones
    assert "jobs~nonce" not in stones
    stones.add("other~a", 0.0)
    assert "other~b" not in stones


def test_the_runs_of_a_job_are_found_by_its_id() -> None:
    table = RunTable()
    mine, other = make(1, request_id="job~a"), make(2, request_id="jobs~a")
    table.add(mine)
    table.add(other)
    assert table.of_job("job") == [mine]
    assert table.of("job") == []
