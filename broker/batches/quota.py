"""Checks what a tenant may have queued in batches. Batches that are validated at the same moment may exceed it together."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.broker.batches.errors import BatchQuotaExceeded, BatchRateExceeded, InputInvalid
from headrace.broker.batches.plan import LinePlan
from headrace.broker.batches.record import BatchRecord, LineError
from headrace.broker.batches.settings import BatchSettings

HOUR_S = 3600.0


def check_batches(tenant: str, others: Iterable[BatchRecord], settings: BatchSettings) -> None:
    """Check that a tenant may have one more batch. Raises BatchQuotaExceeded."""
    count = sum(1 for record in others if record.tenant == tenant and not record.final)
    if count >= settings.tenant_batches:
        raise BatchQuotaExceeded(f"{count} batches have not ended; the limit is {settings.tenant_batches}")


def check_rate(tenant: str, others: Iterable[BatchRecord], settings: BatchSettings, now: float) -> None:
    """Check that a tenant may create one more batch in this hour, whatever became of the others. Raises BatchRateExceeded."""
    most = settings.tenant_batches_per_hour
    recent = sorted(record.created for record in others if record.tenant == tenant and record.created > now - HOUR_S)
    if len(recent) >= most:
        raise BatchRateExceeded(
            f"{len(recent)} batches were created in the last hour; the limit is {most}",
            retry_after_s=max(1.0, recent[-most] + HOUR_S - now),
        )


def check_quota(record: BatchRecord, plan: LinePlan, others: Iterable[BatchRecord], settings: BatchSettings) -> None:
    """Check that a batch fits beside the other ones of its tenant. Raises InputInvalid."""
    mine = [other for other in others if other.tenant == record.tenant and other.id != record.id]
    lines = sum(other.queued for other in mine)
    if lines + len(plan) > settings.tenant_lines:
        raise _over("queued_lines_exceeded", "lines", lines, len(plan), settings.tenant_lines)
    tokens, most = sum(other.queued_tokens for other in mine), settings.tenant_prompt_tokens
    if most and tokens + plan.prompt_tokens > most:
        raise _over("token_limit_exceeded", "prompt tokens", tokens, plan.prompt_tokens, most)


def _over(code: str, what: str, queued: int, more: int, most: int) -> InputInvalid:
    message = (
        f"The batch has {more} {what}, and {queued} are queued in other batches; the limit is {most}. "
        "Try again once some of them have ended."
    )
    return InputInvalid([LineError(code=code, message=message)])
