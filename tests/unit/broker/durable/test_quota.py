"""What a tenant may have queued: the newest jobs are over the quota, and what was admitted stays so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.durable.quota import QueueUsage, QuotaLimits, TenantLedger, over, usage_of
from headrace.broker.durable.stored_job import parse_job

SIZES = st.lists(st.integers(1, 100), max_size=30)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (QuotaLimits(), None),
        (QuotaLimits(jobs=3, bytes=30, tokens=10), None),
        (QuotaLimits(jobs=2), "tenant_jobs"),
        (QuotaLimits(bytes=29), "tenant_job_bytes"),
        (QuotaLimits(tokens=9), "tenant_job_tokens"),
    ],
)
def test_the_limit_that_is_exceeded_is_named(limits: QuotaLimits, reason: str | None) -> None:
    assert over(limits, QueueUsage(2, 20, 8), QueueUsage(1, 10, 2)) == reason


def test_prompt_tokens_are_estimated_from_the_body_at_four_bytes_each() -> None:
    job = parse_job(b'{"a": 1}', {}, tenant="t", seq=1, stored=0.0)
    assert usage_of(8, job) == QueueUsage(1, 8, 2)


@given(SIZES, st.integers(0, 20), st.integers(0, 500))
def test_what_is_admitted_never_exceeds_the_limits_and_a_smaller_job_behind_a_large_one_still_fits(
    sizes: list[int], jobs: int, size: int
) -> None:
    limits, ledger = QuotaLimits(jobs=jobs, bytes=size), TenantLedger()
    for seq, one in enumerate(sizes, 1):
        before = ledger.admitted
        reason = ledger.take(seq, usage_of(one), limits, exempt=False)
        assert (reason is None) == (over(limits, before, usage_of(one)) is None)
    assert ledger.seq == len(sizes)
    assert not jobs or ledger.admitted.jobs <= jobs
    assert not size or ledger.admitted.bytes <= size


def test_jobs_that_have_ended_make_room() -> None:
    limits, ledger = QuotaLimits(bytes=100), TenantLedger()
    assert [ledger.take(seq, usage_of(25), limits, exempt=False) for seq in range(1, 6)] == [None] * 4 + ["tenant_job_bytes"]
    ledger.settle(waiting=2)
    assert ledger.admitted == QueueUsage(2, 50, 12)
    assert ledger.take(6, usage_of(25), limits, exempt=False) is None


def test_a_line_of_a_batch_is_never_over_and_counts() -> None:
    limits, ledger = QuotaLimits(jobs=1), TenantLedger()
    assert [ledger.take(seq, usage_of(1), limits, exempt=True) for seq in (1, 2)] == [None, None]
    assert ledger.take(3, usage_of(1), limits, exempt=False) == "tenant_jobs"
