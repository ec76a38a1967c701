"""States of a batch only move on, and each change is written with its time."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.batches.record import (
    FINAL,
    NEXT,
    BatchChangeRefused,
    BatchRecord,
    BatchStatus,
    LineCounts,
    closing,
    end_of,
    is_batch_id,
    line_name,
    move,
    new_batch_id,
    overdue,
)

STATES: list[BatchStatus] = list(NEXT)


def record(status: BatchStatus = "validating", **changes: object) -> BatchRecord:
    made = BatchRecord(
        id=new_batch_id(),
        tenant="_",
        endpoint="/v1/completions",
        input_file_id="file-1",
        completion_window="24h",
        created=1.0,
        expires_at=100,
        status=status,
    )
    return msgspec.structs.replace(made, **changes)


@given(st.lists(st.sampled_from(STATES), max_size=12))
def test_a_batch_never_comes_back_to_a_state_it_has_left(wishes: list[BatchStatus]) -> None:
    now, seen = record(), ["validating"]
    for number, wish in enumerate(wishes):
        try:
            now = move(now, wish, now=10.0 + number)
        except BatchChangeRefused:
            continue
        assert wish not in seen
        assert getattr(now, f"{wish}_at") == 10 + number
        seen.append(wish)
    assert len(seen) <= 4


@pytest.mark.parametrize("status", STATES)
def test_every_state_leads_to_an_end(status: BatchStatus) -> None:
    for _ in range(4):
        if status in FINAL:
            return
        status = min(NEXT[status])
    raise AssertionError(status)


@pytest.mark.parametrize("status", sorted(FINAL))
def test_nothing_follows_an_end(status: BatchStatus) -> None:
    assert not NEXT[status]


def test_a_refused_change_names_both_states() -> None:
    with pytest.raises(BatchChangeRefused, match="is completed and cannot become cancelling"):
        move(record("completed"), "cancelling", now=1.0)


def test_lines_get_the_end_that_the_batch_is_going_to() -> None:
    ends = {status: closing(status) for status in STATES}
    assert {s for s, end in ends.items() if end == "cancelled"} == {"cancelling", "cancelled"}
    assert {s for s, end in ends.items() if end == "expired"} == {"expiring", "expired"}
    assert {end_of(s) for s in ("finalizing", "cancelling", "expiring")} == {"completed", "cancelled", "expired"}


def test_only_a_batch_that_may_still_run_expires() -> None:
    assert {s for s in STATES if overdue(record(s), 100.0)} == {"validating", "in_progress"}
    assert not overdue(record(), 99.9)


def test_a_record_survives_its_bytes_and_old_ones_have_defaults() -> None:
    full = record("in_progress", counts=LineCounts(total=3, completed=1), tries=["a"], metadata={"k": "v"})
    assert msgspec.json.decode(msgspec.json.encode(full), type=BatchRecord) == full


def test_queued_lines_are_those_without_a_result_while_the_batch_runs() -> None:
    counts = LineCounts(total=10, completed=4, failed=1)
    assert record("in_progress", counts=counts, prompt_tokens=100).queued_tokens == 50
    assert record("cancelled", counts=counts).queued == 0


def test_ids_of_batches_are_tokens_of_one_form() -> None:
    assert is_batch_id(new_batch_id())
    for other in ("", "batch_", "batch_" + "g" * 32, "x" * 38, "batch_" + "0" * 33, "0" * 32):
        assert not is_batch_id(other)
    assert len(line_name(new_batch_id(), 50_000)) <= 64
