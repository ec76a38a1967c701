"""Entries of a stream become the state that they say, whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.durable.errors import StreamIncomplete
from headrace.broker.durable.stored_job import StoredJob, parse_job
from headrace.broker.durable.stream_writer import (
    JobState,
    asks_carriers,
    end_of,
    fault_of,
    fold,
    has_entries,
    is_carrier_poison,
    is_left_to,
    window,
)
from headrace.broker.errors import (
    DeadlineExceeded,
    JobCancelled,
    JobError,
    JobFailed,
    JobInvalid,
    JobRefused,
    JobWithdrawn,
    PoisonJob,
    ResumeImpossible,
    SlowClient,
)
from headrace.broker.messages.control import HistoryEntry
from headrace.broker.messages.durable import HEADER_STREAM, StreamEntry
from headrace.broker.messages.frames import Finish, Row


def row(choice: int, offset: int, ids: Sequence[int], *, last: bool = False) -> Row:
    fin = Finish(reason="stop", completion_tokens=offset + len(ids)) if last else None
    return Row("", 1, 1, choice, offset, list(ids), [""] * len(ids), fin=fin)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[StreamEntry], list[list[int]]]:
    """A stream as carriers write it: takes, each followed by some rows of two choices, perhaps an end."""
    entries: list[StreamEntry] = []
    tokens: list[list[int]] = [[], []]
    events = 0
    for carrier in range(draw(st.integers(1, 4))):
        nonce = f"n{carrier}"
        entries.append(StreamEntry(nonce=nonce, n=1, kind="take", carrier=f"c{carrier}"))
        for n in range(draw(st.integers(0, 4))):
            rows = []
            for choice in draw(st.lists(st.sampled_from([0, 1]), max_size=3)):
                ids = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
                rows.append(row(choice, len(tokens[choice]), ids))
                tokens[choice] += ids
            made = [b"e"] * draw(st.integers(0, 2))
            entries.append(
                StreamEntry(nonce=nonce, n=n + 2, kind="rows", rows=rows, events=made, first_event=events if made else 0)
            )
            events += len(made)
    return entries, tokens


def numbered(entries: Sequence[StreamEntry]) -> list[tuple[int, StreamEntry]]:
    return [(10 + 3 * i, entry) for i, entry in enumerate(entries)]


@given(streams())
def test_every_token_of_the_stream_is_in_the_state_once(made: tuple[list[StreamEntry], list[list[int]]]) -> None:
    entries, tokens = made
    state = fold(numbered(entries))
    assert state.emitted_of(2) == tokens
    assert state.events == sum(len(entry.events) for entry in entries)
    assert state.last_seq == 10 + 3 * (len(entries) - 1)
    assert state.writer == (entries[-1].nonce, entries[-1].n)
    assert [take.nonce for take in state.takes] == sorted({entry.nonce for entry in entries})


@given(streams(), st.data())
def test_a_stream_that_lacks_an_entry_is_incomplete(
    made: tuple[list[StreamEntry], list[list[int]]], data: st.DataObject
) -> None:
    entries, _ = made
    missing = data.draw(st.integers(0, len(entries) - 1))
    rest = entries[:missing] + entries[missing + 1 :]
    lacking = entries[missing]
    followed = any(entry.nonce == lacking.nonce for entry in entries[missing + 1 :])
    tokens_later = lacking.rows and any(r.choice == m.choice for e in rest[missing:] for r in e.rows for m in lacking.rows)
    events_later = lacking.events and any(entry.events for entry in rest[missing:])
    if followed or tokens_later or events_later:
        with pytest.raises(StreamIncomplete):
            fold(numbered(rest))
    else:
        fold(numbered(rest))


@given(streams(), st.data())
def test_a_stream_with_an_entry_twice_is_refused(made: tuple[list[StreamEntry], list[list[int]]], data: st.DataObject) -> None:
    entries, _ = made
    twice = data.draw(st.integers(0, len(entries) - 1))
    with pytest.raises(StreamIncomplete):
        fold(numbered([*entries[: twice + 1], *entries[twice:]]))


def test_nothing_follows_the_end() -> None:
    state = JobState()
    state.apply(1, StreamEntry(nonce="a", n=1, kind="take", carrier="c"))
    state.apply(2, StreamEntry(nonce="a", n=2, kind="end", status="done", rows=[row(0, 0, [1], last=True)]))
    assert state.end is not None
    assert state.finished_of(2)[0] is not None
    assert state.finished_of(2)[1] is None
    with pytest.raises(StreamIncomplete, match="follows the end"):
        state.apply(3, StreamEntry(nonce="b", n=1, kind="take", carrier="d"))


def test_tokens_after_the_end_of_their_choice_are_refused() -> None:
    state = fold([(1, StreamEntry(nonce="a", n=1, kind="rows", rows=[row(0, 0, [1], last=True)]))])
    with pytest.raises(StreamIncomplete, match="choice 0"):
        state.apply(2, StreamEntry(nonce="a", n=2, kind="rows", rows=[row(0, 1, [2])]))


def test_takers_count_until_they_began_and_crashes_once() -> None:
    crash = HistoryEntry(1, "w", 3)
    entries = [
        StreamEntry(nonce="a", n=1, kind="take", carrier="c"),
        StreamEntry(nonce="b", n=1, kind="take", carrier="d"),
        StreamEntry(nonce="b", n=2, kind="ok"),
        StreamEntry(nonce="b", n=3, kind="crash", history=[crash]),
        StreamEntry(nonce="b", n=4, kind="crash", history=[crash, HistoryEntry(2, "x", 1)]),
    ]
    state = fold(numbered(entries))
    assert [take.carrier for take in state.unbegun()] == ["c"]
    assert state.history == [crash, HistoryEntry(2, "x", 1)]


def test_entries_survive_the_wire() -> None:
    entry = StreamEntry(nonce="a", n=1, kind="rows", rows=[row(0, 0, [1])], events=[b"{}"])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=StreamEntry) == entry


def job(*, durable: bool = False) -> StoredJob:
    return parse_job(b"{}", {HEADER_STREAM: "1"} if durable else {}, tenant="t", seq=1, stored=0.0)


def taken(*carriers: str, begun: int = 0) -> JobState:
    entries = []
    for i, carrier in enumerate(carriers):
        entries.append(StreamEntry(nonce=str(i), n=1, kind="take", carrier=carrier))
        if i < begun:
            entries.append(StreamEntry(nonce=str(i), n=2, kind="ok"))
    return fold(enumerate(entries, 1))


def test_a_plain_job_has_entries_from_its_second_delivery_on() -> None:
    assert not has_entries(job(), 1)
    assert has_entries(job(), 2)
    assert has_entries(job(durable=True), 1)


def test_carriers_are_asked_about_what_was_delivered_or_taken_before() -> None:
    assert not asks_carriers(1, JobState())
    assert asks_carriers(2, JobState())
    assert asks_carriers(1, taken("a"))


@pytest.mark.parametrize(
    ("taker", "others", "gone", "left"),
    [
        (False, [], False, False),
        (False, [False, None], False, False),
        (False, [None, True], False, True),
        (True, [], True, True),
        (None, [False], False, True),
        (None, [False], True, False),
    ],
)
def test_a_job_is_left_to_a_carrier_that_has_it_or_may_have_it(
    taker: bool | None, others: list[bool | None], gone: bool, left: bool
) -> None:
    assert is_left_to(taker, others, taker_gone=gone) is left


def test_three_carriers_that_died_before_they_submitted_a_job_make_it_poison() -> None:
    assert is_carrier_poison(taken("a", "b", "c"), {"a", "b", "c"})
    assert not is_carrier_poison(taken("a", "b", "c"), {"a", "b"})
    assert not is_carrier_poison(taken("a", "a", "b"), {"a", "b"})
    assert not is_carrier_poison(taken("a", "b", "c", begun=1), {"a", "b", "c"})


@given(st.integers(0, 5000), st.integers(0, 9), st.integers(1, 3000))
def test_a_window_is_bounded_and_shut_without_capacity(slots: int, carriers: int, most: int) -> None:
    found = window(slots, carriers, most)
    assert 0 <= found <= most
    assert (found == 0) == (slots == 0)


def test_carriers_share_the_slots_of_a_pool() -> None:
    assert window(64, 1, 1024) == 128
    assert window(64, 4, 1024) == 32
    assert window(2, 8, 1024) == 8


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (JobRefused("no room", reason="shed"), "retry"),
        (JobRefused("no worker", reason="no_worker"), "retry"),
        (JobCancelled(), "retry"),
        (SlowClient(), "retry"),
        (ResumeImpossible(), "retry"),
        (DeadlineExceeded(), "expired"),
        (JobWithdrawn(), "cancelled"),
        (PoisonJob(), "poison"),
        (JobFailed("engine"), "failed"),
        (JobInvalid("no", param="n"), "failed"),
    ],
)
def test_each_end_of_a_run_has_its_meaning_for_the_job(error: JobError, ended: str) -> None:
    assert end_of(error, emitted=False) == ended


def test_what_clients_have_cannot_be_begun_again() -> None:
    assert end_of(ResumeImpossible(), emitted=True) == "failed"


def test_a_fault_names_what_was_refused() -> None:
    assert fault_of(JobRefused("full", reason="shed")).code == "shed"
    assert fault_of(JobInvalid("no", param="n")).param == "n"
