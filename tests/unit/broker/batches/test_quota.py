"""A tenant may have so many batches, lines and prompt tokens queued."""

import pytest

from headrace.broker.batches.errors import BatchQuotaExceeded, BatchRateExceeded, InputInvalid
from headrace.broker.batches.plan import LinePlan
from headrace.broker.batches.quota import check_batches, check_quota, check_rate
from headrace.broker.batches.record import BatchRecord, LineCounts
from headrace.broker.batches.settings import BatchSettings
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
