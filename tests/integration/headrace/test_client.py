"""The client on a real server: jobs are stored once, results come as they are made, and nothing needs a second try.

A stand-in ends the jobs (tests/support/job_stand_in.py); real carriers are in tests/integration/frontend.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from headrace.client import Client, ClientOptions, JobFailed, NotSubmitted, ResultTimeout, UnknownJob, connect
from headrace.client.sync import connect as connect_sync
from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from tests.support.job_stand_in import answered, carrying, ended


def chat(text: str) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


@pytest_asyncio.fixture
async def client(nats_server: EmbeddedServer, subjects: Subjects, connection: Connection) -> AsyncIterator[Client]:
    async with connect(nats_server.url, ClientOptions(tenant="acme", prefix=subjects.prefix)) as client:
        yield client


async def test_a_job_is_answered(client: Client, connection: Connection, subjects: Subjects) -> None:
    async with carrying(connection, subjects, "m") as taken:
        job = await client.submit(chat("abc"), id="one")
        result = await job.result(timeout_s=10)
    assert (result.id, result.status, result.status_code, result.text) == ("one", "done", 200, "cba")
    assert [(one.name, one.tenant, one.request_class) for one in taken] == [("one", "acme", "batch")]


async def test_the_same_id_is_one_job_also_after_it_has_ended(
    client: Client, connection: Connection, subjects: Subjects
) -> None:
    async with carrying(connection, subjects, "m") as taken:
        first = await (await client.submit(chat("abc"), id="one")).result(timeout_s=10)
        again = await client.submit(chat("xyz"), id="one")
        second = await again.result(timeout_s=10)
    assert again.known
    assert (first.text, second.text, len(taken)) == ("cba", "cba", 1)


async def test_two_tenants_may_use_the_same_id(
    client: Client, connection: Connection, subjects: Subjects, nats_server: EmbeddedServer
) -> None:
    async with (
        carrying(connection, subjects, "m"),
        connect(nats_server.url, ClientOptions(tenant="other", prefix=subjects.prefix)) as other,
    ):
        mine, theirs = await client.submit(chat("abc"), id="one"), await other.submit(chat("xyz"), id="one")
        assert (await mine.result(timeout_s=10)).text == "cba"
        assert (await theirs.result(timeout_s=10)).text == "zyx"


async def test_many_jobs_never_have_more_open_than_the_window(
    client: Client, connection: Connection, subjects: Subjects
) -> None:
    asked = 0

    def requests() -> object:
        nonlocal asked
        for n in range(60):
            asked += 1
            yield chat(f"text {n}")

    got: set[str] = set()
    most = 0
    async with carrying(connection, subjects, "m"):
        async for result in client.submit_all(requests(), window=7):  # type: ignore[arg-type]
            most = max(most, asked - len(got))
            got.add(result.text)
    assert got == {f"text {n}"[::-1] for n in range(60)}
    assert most <= 7


async def test_a_large_result_is_fetched_from_the_object_store(
    client: Client, connection: Connection, subjects: Subjects
) -> None:
    async with carrying(connection, subjects, "m", large=True):
        result = await (await client.submit(chat("abc" * 1000))).result(timeout_s=10)
    assert result.text == "cba" * 1000


async def test_a_job_that_fails_says_why(client: Client, connection: Connection, subjects: Subjects) -> None:
    async with carrying(connection, subjects, "m", lambda job: ended(job, "expired")):
        result = await (await client.submit(chat("abc"))).result(timeout_s=10)
    assert (result.status, result.ok, result.error) == ("expired", False, "the job was expired")
    with pytest.raises(JobFailed, match="ended as expired"):
        _ = result.text


async def test_a_wait_ends_and_the_job_goes_on(client: Client, connection: Connection, subjects: Subjects) -> None:
    job = await client.submit(chat("abc"), id="late")
    with pytest.raises(ResultTimeout, match="'late'"):
        await job.result(timeout_s=0.05)
    assert [one.id for one in await client.jobs()] == ["late"]
    async with carrying(connection, subjects, "m"):
        assert (await job.result(timeout_s=10)).text == "cba"
    assert [(one.id, one.status) for one in await client.jobs()] == [("late", "done")]


async def test_one_of_two_waits_for_a_job_may_be_given_up(client: Client, connection: Connection, subjects: Subjects) -> None:
    job = await client.submit(chat("abc"))
    waiting = asyncio.ensure_future(job.result(timeout_s=10))
    with pytest.raises(ResultTimeout):
        await job.result(timeout_s=0.05)
    async with carrying(connection, subjects, "m"):
        assert (await waiting).text == "cba"


async def test_a_job_that_waits_is_cancelled_and_one_that_has_ended_is_not(
    client: Client, connection: Connection, subjects: Subjects
) -> None:
    waits = await client.submit(chat("abc"), id="waits")
    assert await waits.cancel() == "cancelled"
    assert (await waits.result(timeout_s=10)).status == "cancelled"
    async with carrying(connection, subjects, "m"):
        ended_job = await client.submit(chat("abc"), id="ended")
        await ended_job.result(timeout_s=10)
    assert await ended_job.cancel() == "done"


async def test_a_job_that_was_never_submitted_cannot_be_cancelled(client: Client) -> None:
    with pytest.raises(UnknownJob, match="'nothing'"):
        await client.cancel("nothing")
    assert await client.peek("nothing") is None


async def test_a_body_without_a_model_needs_one_known_model(client: Client) -> None:
    with pytest.raises(NotSubmitted, match="0 are known: none"):
        await client.submit({"messages": []})


async def test_an_error_of_the_body_leaves_the_connection_as_it_is(nats_server: EmbeddedServer, subjects: Subjects) -> None:
    with pytest.raises(ValueError, match="mine"):
        async with connect(nats_server.url, ClientOptions(prefix=subjects.prefix)):
            raise ValueError("mine")


async def test_the_synchronous_face_does_the_same(
    nats_server: EmbeddedServer, connection: Connection, subjects: Subjects
) -> None:
    def work() -> tuple[str, set[str], list[str]]:
        with connect_sync(nats_server.url, ClientOptions(prefix=subjects.prefix)) as hr:
            one = hr.ask(chat("abc"), id="one", timeout_s=10)
            many = {result.text for result in hr.submit_all([chat("de"), chat("fg")])}
            return one.text, many, [result.id for result in hr.wait(["one"])]

    async with carrying(connection, subjects, "m", answered):
        assert await asyncio.to_thread(work) == ("cba", {"ed", "gf"}, ["one"])


async def test_a_synchronous_connection_that_fails_says_so() -> None:
    def work() -> None:
        with connect_sync("nats://127.0.0.1:1"):
            pass

    with pytest.raises(Exception, match=r"127\.0\.0\.1:1"):
        await asyncio.to_thread(work)
