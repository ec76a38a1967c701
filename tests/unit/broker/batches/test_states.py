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
    move,
    new_batch_id,
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
