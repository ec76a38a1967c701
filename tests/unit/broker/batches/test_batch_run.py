"""A tenant may have so many batches, lines and prompt tokens queued."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.batches.batch_run import LEAST_OUT, check_batches, check_quota, check_rate, for_each, lines_out, shares
from headrace.broker.batches.record import BatchQuotaExceeded, BatchRateExceeded, BatchRecord, InputInvalid, LineCounts
from headrace.broker.batches.settings import BatchSettings
from headrace.broker.batches.validation import LinePlan
from tests.unit.broker.batches.test_states import record


def plan(lines: int, tokens: int) -> LinePlan:
    made = LinePlan()
    for number in range(lines):
        made.add(number, 1, 0, 0)
    made.close("d", tokens)
    return made


def running(tenant: str = "_") -> BatchRecord:
    counts = LineCounts(total=10, completed=4)
    return record("in_progress", tenant=tenant, counts=counts, prompt_tokens=100)


def test_batches_that_have_not_ended_are_counted_per_tenant() -> None:
    settings = BatchSettings(tenant_batches=2)
    check_batches("_", [running(), running("other"), record("completed")], settings)
    with pytest.raises(BatchQuotaExceeded, match="2 batches have not ended; the limit is 2"):
        check_batches("_", [running(), running()], settings)


def test_lines_without_a_result_are_counted() -> None:
    settings = BatchSettings(tenant_lines=10)
    check_quota(running(), plan(4, 0), [running(), running("other")], settings)
    with pytest.raises(InputInvalid, match="has 5 lines, and 6 are queued in other batches; the limit is 10") as caught:
        check_quota(running(), plan(5, 0), [running()], settings)
    assert caught.value.errors[0].code == "queued_lines_exceeded"


def test_prompt_tokens_are_counted_if_there_is_a_limit() -> None:
    check_quota(running(), plan(1, 10**9), [running()], BatchSettings())
    settings = BatchSettings(tenant_prompt_tokens=100)
    check_quota(running(), plan(1, 40), [running()], settings)
    with pytest.raises(InputInvalid, match="41 prompt tokens") as caught:
        check_quota(running(), plan(1, 41), [running()], settings)
    assert caught.value.errors[0].code == "token_limit_exceeded"


def test_the_batch_itself_is_not_counted() -> None:
    own = running()
    check_quota(own, plan(10, 0), [own], BatchSettings(tenant_lines=10))


def test_batches_of_the_last_hour_are_counted_whatever_became_of_them() -> None:
    settings = BatchSettings(tenant_batches_per_hour=2)
    now = 10_000.0
    ended, old = record("completed", created=now - 3000), record(created=now - 3600)
    others = [ended, old, record("failed", tenant="other", created=now)]
    check_rate("_", others, settings, now)
    with pytest.raises(BatchRateExceeded, match="2 batches were created in the last hour; the limit is 2") as caught:
        check_rate("_", [*others, record(created=now - 100)], settings, now)
    assert caught.value.retry_after_s == 600
    with pytest.raises(BatchRateExceeded) as caught:
        check_rate("_", [*others, record(created=now - 100), record(created=now - 50)], settings, now)
    assert caught.value.retry_after_s == 3500


async def test_each_item_is_done_once_and_only_so_many_at_a_time() -> None:
    running = most = 0
    done: list[int] = []

    async def work(item: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        done.append(item)

    await for_each(range(50), work, at_once=4)
    assert (sorted(done), most) == (list(range(50)), 4)


async def test_the_first_error_ends_the_rest() -> None:
    begun: list[int] = []

    async def work(item: int) -> None:
        begun.append(item)
        await asyncio.sleep(0)
        raise ValueError(item)

    with pytest.raises(ValueError, match="0"):
        await for_each(range(50), work, at_once=2)
    assert len(begun) == 2


async def test_no_items_are_no_work() -> None:
    async def work(item: int) -> None:
        raise AssertionError(item)

    await for_each([], work, at_once=0)


HOUR = 3600


def batch(total: int, ends: int, done: int = 0) -> BatchRecord:
    return record("in_progress", counts=LineCounts(total=total, completed=done), expires_at=ends)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(-100, 100_000)), max_size=8), st.integers(1, 2000))
def test_shares_fill_the_window_and_no_batch_is_left_out(facts: list[tuple[int, int]], window: int) -> None:
    batches = [batch(total, ends) for total, ends in facts]
    given_ = shares(batches, window, 0.0)
    open_ = {b.id: b.counts.open for b in batches if b.counts.open}
    assert given_.keys() == open_.keys()
    assert all(1 <= given_[i] <= open_[i] for i in given_)
    assert sum(given_.values()) <= max(window, len(given_))
    assert sum(given_.values()) >= min(window, sum(open_.values()))


def test_of_two_batches_alike_the_one_that_ends_first_gets_more() -> None:
    soon, late = batch(1000, 1800), batch(1000, 24 * HOUR)
    found = shares([late, soon], 100, 0.0)
    assert found[soon.id] > 5 * found[late.id]


def test_a_batch_alone_gets_all() -> None:
    only = batch(1000, HOUR)
    assert shares([only], 64, 0.0) == {only.id: 64}


def test_the_part_that_a_small_batch_does_not_need_goes_to_the_others() -> None:
    small, large = batch(3, 600), batch(10_000, HOUR)
    assert shares([small, large], 100, 0.0) == {small.id: 3, large.id: 97}


def test_three_windows_all_meet_their_deadlines_where_the_work_fits() -> None:
    """Lines per second are shared as the window is. All three need 90 percent of the capacity until the first deadline."""
    batches = {b.id: b for b in (batch(9000, 1800), batch(9000, 2 * HOUR), batch(9000, 24 * HOUR))}
    rate = (9000 / 1800 + 9000 / (2 * HOUR) + 9000 / (24 * HOUR)) / 0.9
    left = {i: float(b.counts.open) for i, b in batches.items()}
    ended: dict[str, float] = {}
    for now in range(0, 24 * HOUR, 10):
        if len(ended) == 3:
            break
        now_open = [
            msgspec.structs.replace(b, counts=LineCounts(total=9000, completed=9000 - max(1, int(left[i]))))
            for i, b in batches.items()
            if i not in ended
        ]
        found = shares(now_open, 64, now)
        for i, part in found.items():
            left[i] -= rate * 10 * part / sum(found.values())
            if left[i] <= 0:
                ended[i] = now
    assert all(ended[i] <= b.expires_at for i, b in batches.items())


def test_no_more_lines_are_out_than_the_workers_of_the_model_can_use_soon() -> None:
    assert lines_out(64, 1024) == 256
    assert lines_out(4096, 1024) == 1024
    assert lines_out(0, 1024) == LEAST_OUT, "workers that are gone for a moment find lines when they are back"
    assert lines_out(64, 8) == 8
