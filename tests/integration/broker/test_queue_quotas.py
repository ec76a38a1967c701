"""The quotas of tenants on queued jobs, on a real stream: frontends refuse, and what publishers stored beyond is ended."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import pytest

from headrace.broker.durable.quota import QueueQuotas, QuotaLimits
from headrace.broker.durable.results import ResultStore
from headrace.broker.durable.stored_job import NewJob
from headrace.broker.durable.stored_jobs import StoredJobs
from headrace.broker.errors import Overloaded
from headrace.broker.messages.durable import HEADER_BATCH, HEADER_JOB, HEADER_STREAM
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import QueueFull
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology

BODY = b'{"model": "m"}'


async def publish(connection: Connection, subjects: Subjects, *jobs: str, tenant: str = "t", **headers: str) -> None:
    for job in jobs:
        named = {HEADER_JOB: job, **{name.replace("_", "-"): value for name, value in headers.items()}}
        await connection.publish(subjects.job("m", tenant), BODY, headers=named)


async def refused(connection: Connection, subjects: Subjects, tenant: str, *jobs: str) -> dict[str, str]:
    found = await ResultStore(connection, subjects).get_many(tenant, list(jobs))
    codes = {}
    for job, result in found.items():
        assert result.status == "failed"
        assert result.response is not None
        assert result.response.status_code == 429
        codes[job] = json.loads(bytes(result.response.body))["error"]["code"]
    return codes


async def waiting(connection: Connection, subjects: Subjects) -> int:
    return sum((await connection.subject_counts(subjects.stream("JOB"), subjects.all_jobs())).values())


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (QuotaLimits(jobs=2), "tenant_jobs"),
        (QuotaLimits(bytes=2 * len(BODY)), "tenant_job_bytes"),
        (QuotaLimits(tokens=2 * (len(BODY) // 4)), "tenant_job_tokens"),
    ],
)
async def test_the_newest_jobs_of_a_direct_publisher_are_ended_with_an_error_that_names_the_quota(
    connection: Connection, subjects: Subjects, limits: QuotaLimits, code: str
) -> None:
    quotas = QueueQuotas(connection, subjects, limits)
    await publish(connection, subjects, "a", "b")
    await publish(connection, subjects, "other", tenant="u")
    assert await quotas.sweep() == 0
    await publish(connection, subjects, "c", "d")
    assert await quotas.sweep() == 2
    assert await refused(connection, subjects, "t", "a", "b", "c", "d") == {"c": code, "d": code}
    assert await waiting(connection, subjects) == 3
    (first,) = await connection.subject_messages(subjects.stream("JOB"), subjects.job("m", "t"), limit=1)
    await connection.delete_message(subjects.stream("JOB"), first.seq)  # it has ended
    await publish(connection, subjects, "e")
    assert await quotas.sweep() == 0, "there is room again"


async def test_a_durable_job_over_the_quota_ends_in_its_stream_as_well(connection: Connection, subjects: Subjects) -> None:
    await publish(connection, subjects, "a")
    await publish(connection, subjects, "b", **{HEADER_STREAM: "1"})
    assert await QueueQuotas(connection, subjects, QuotaLimits(jobs=1)).sweep() == 1
    assert await refused(connection, subjects, "t", "b") == {"b": "tenant_jobs"}
    assert len(await connection.last_messages(subjects.stream("RSP"), [subjects.rsp("t", "b")])) == 1


async def test_lines_of_a_batch_of_the_tenant_are_left_to_the_quotas_of_batches(
    connection: Connection, subjects: Subjects
) -> None:
    def is_line(tenant: str, batch: str) -> bool:
        return (tenant, batch) == ("t", "batch_1")

    await publish(connection, subjects, "a")
    await publish(connection, subjects, "line", **{HEADER_BATCH: "batch_1"})
    await publish(connection, subjects, "claims", **{HEADER_BATCH: "batch_2"})
    assert await QueueQuotas(connection, subjects, QuotaLimits(jobs=1), is_line=is_line).sweep() == 1
    assert list(await refused(connection, subjects, "t", "a", "line", "claims")) == ["claims"]


@pytest.mark.parametrize(("caps", "scope"), [({"job_cap": 2}, "subject"), ({"job_bytes": 220}, "bytes")])
async def test_the_stream_refuses_a_direct_publisher_before_anything_is_stored(
    connect: Callable[..., Awaitable[Connection]], subjects: Subjects, caps: dict[str, int], scope: str
) -> None:
    connection = await connect(topology=Topology(subjects, **caps))
    await publish(connection, subjects, "a", "b")
    with pytest.raises(QueueFull) as caught:
        await publish(connection, subjects, "c")
    assert caught.value.scope == scope
    assert await waiting(connection, subjects) == 2


@pytest.mark.parametrize("limits", [QuotaLimits(jobs=2), QuotaLimits(bytes=30)])
async def test_a_frontend_refuses_before_anything_is_stored(
    connection: Connection, subjects: Subjects, limits: QuotaLimits
) -> None:
    jobs = StoredJobs(connection, subjects, QueueQuotas(connection, subjects, limits))

    def job(name: str, tenant: str = "t") -> NewJob:
        return NewJob(name=name, tenant=tenant, model_slug="m", endpoint="/v1/completions", body=BODY, deadline=4e9)

    await jobs.publish(job("a"))
    await jobs.publish(job("b"))
    with pytest.raises(Overloaded) as caught:
        await jobs.publish(job("c"))
    assert caught.value.reason in ("tenant_jobs", "tenant_job_bytes")
    assert await waiting(connection, subjects) == 2
    await jobs.publish(job("c", "u"))
