"""Ends stored jobs as a carrier would, without one: for tests of what publishers and clients see."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable

import msgspec

from headrace.broker.durable.stored_job import StoredJob, parse_job
from headrace.broker.messages.durable import JobResult, ResultError, ResultObject, ResultResponse
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import RevisionConflict
from headrace.jetstream.ports import Delivery
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import job_consumer

Answer = Callable[[StoredJob], JobResult]


def answered(job: StoredJob, *, status_code: int = 200) -> JobResult:
    """An answer that repeats the last message of a chat."""
    said = msgspec.json.decode(job.body)["messages"][-1]["content"]
    body = msgspec.json.encode({"choices": [{"message": {"role": "assistant", "content": said[::-1]}}]})
    response = ResultResponse(status_code=status_code, request_id=job.id, body=msgspec.Raw(body))
    return JobResult(
        id=job.name,
        custom_id=job.custom_id,
        status="done" if status_code == 200 else "failed",
        response=response,
        finished=time.time(),
    )


def ended(job: StoredJob, status: str) -> JobResult:
    error = ResultError(code=status, message=f"the job was {status}")
    return JobResult(id=job.name, custom_id=job.custom_id, status=status, error=error, finished=time.time())  # type: ignore[arg-type]


async def in_object(connection: Connection, subjects: Subjects, result: JobResult) -> JobResult:
    """The same result with its response in the object store."""
    assert result.response is not None
    body = msgspec.json.encode(result.response)
    name = f"{result.id}.1"
    await connection.objects(subjects.bucket("results")).put(name, body)
    place = ResultObject(name=name, size=len(body), digest=hashlib.sha256(body).hexdigest())
    return msgspec.structs.replace(result, response=None, object=place)


@contextlib.asynccontextmanager
async def carrying(
    connection: Connection, subjects: Subjects, model_slug: str, answer: Answer = answered, *, large: bool = False
) -> AsyncIterator[list[StoredJob]]:
    """End all jobs for a model; yields what was taken."""
    taken: list[StoredJob] = []
    consumer = job_consumer(subjects, model_slug)
    await connection.ensure_consumer(consumer)
    deliveries: asyncio.Queue[Delivery] = asyncio.Queue()
    pull = connection.pull(consumer.stream, consumer.name, deliveries.put_nowait, credit=1000)

    async def end() -> None:
        while True:
            delivery = await deliveries.get()
            pull.add_credit()
            tenant = subjects.parse_job(delivery.subject).tenant
            job = parse_job(delivery.data, delivery.headers, tenant=tenant, seq=delivery.stream_seq, stored=time.time())
            taken.append(job)
            result = answer(job)
            if large:
                result = await in_object(connection, subjects, result)
            with contextlib.suppress(RevisionConflict):
                await connection.publish(
                    subjects.result(tenant, job.token), msgspec.json.encode(result), expect_last_subject_seq=0
                )
            delivery.ack()

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(pull.run()), tasks.create_task(end())]
        try:
            yield taken
        finally:
            await pull.stop()
            for task in running:
                task.cancel()
