"""Gives the planning of a stored job what it reads of an HTTP exchange: tenant, ids and time."""

from __future__ import annotations

from typing import NoReturn

from starlette.types import Message

from headrace.broker.durable.client_names import is_made_for, made_at
from headrace.broker.durable.names import RUN_MARK, job_of_run, run_id
from headrace.broker.durable.stored_job import StoredJob
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.http.json_limits import check_shape
from headrace.frontend.settings import FrontendSettings


class JobExchange(HttpExchange):
    """An exchange without a connection. Its requests are named after one run of the job, its answer after the job."""

    def __init__(self, job: StoredJob, run: str, *, isolated: bool = False) -> None:
        """`run` is the id of the job's first request; those of the others are made of it.

        `isolated`: the prefix caches of tenants are kept apart.
        """
        scope = {
            "type": "job",
            "headers": [],
            "headrace.request_id": run,
            "headrace.tenant": job.tenant,
            "headrace.isolated": isolated,
        }
        super().__init__(scope, _receive, _send)
        self._job = job
        self._run = run
        self._parts = 0
        self.durable = job.durable
        self.from_publisher = not is_made_for(job.name, job.tenant)
        self.job_token = job.token
        self.stored_job = job.id

    async def take_body(self, body: bytes, settings: FrontendSettings) -> None:
        """Check that a body is safe to decode. Raises MalformedBody."""
        self.body_size = self.asked_bytes = len(body)
        await check_shape(body, settings)

    def job_id(self) -> str:
        """Return an id for a request of the job: the run's, then its parts'."""
        part, self._parts = self._parts, self._parts + 1
        if not part:
            return self._run
        return run_id(job_of_run(self._run), self._run.partition(RUN_MARK)[2], part)

    @property
    def created(self) -> int:
        """Return when the job was named or stored, so that every frontend makes the same answer."""
        return made_at(self._job.name, self._job.tenant) or int(self._job.created)


async def _receive() -> NoReturn:
    raise AssertionError("a stored job has no connection to read from")


async def _send(message: Message) -> NoReturn:
    raise AssertionError("a stored job has no connection to write to")
