"""Ports between a carrier, which knows the rules of durable work, and the frontend, which knows the APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from headrace.broker.durable.names import JobRef
from headrace.broker.durable.stored_job import StoredJob
from headrace.broker.jobs import Job
from headrace.broker.messages import JobFault, JobResult, ResultResponse, ResultTokens, Row


class RenderedJob(Protocol):
    """A stored job, ready for submission: the requests that it becomes, and the writer of its answer.

    Rows go in by `take`, in order and once each, also those of earlier carriers: the same rows make the same events and the
    same answer on every frontend. Choices count over all `requests`.
    """

    @property
    def requests(self) -> Sequence[Job]:
        """The requests to submit; a durable stream has one."""

    @property
    def open(self) -> bool:
        """True while more rows are needed."""

    def take(self, rows: list[Row]) -> list[bytes]:
        """Take rows. Returns the events that they make for the clients of a durable stream; a plain job makes none."""

    async def finish(self) -> list[bytes]:
        """Do what is left after the last row (store a response, say) and return the last events. Raises as its writer does."""

    def fail(self, fault: JobFault) -> list[bytes]:
        """End the answer with a fault. Returns the last events."""

    def response(self) -> ResultResponse:
        """Return the whole answer; after `fail` the error in the form of its API."""

    @property
    def tokens(self) -> ResultTokens:
        """The tokens counted so far."""

    def settled(self) -> None:
        """Count the tokens of a job whose result was seen. Called at most once."""


class CarriedBatches(Protocol):
    """Knows the batches whose lines a carrier runs."""

    def closing(self, batch_id: str) -> Literal["cancelled", "expired"] | None:
        """Return how the lines of a batch end that have no result yet; None while it goes on, as far as is known."""

    def see(self, job: JobRef, result: JobResult) -> None:
        """Note the result of a line that was seen at the broker: the first one of the job, which never changes."""


class JobRenderer(Protocol):
    """Renders stored jobs: checks the body, applies the template, makes token ids."""

    def serves(self, model_slug: str) -> bool:
        """Return whether a model of this slug has a card here."""

    async def render(self, job: StoredJob, run: str) -> RenderedJob:
        """Render a job for the run of this id. Its answer's own id and time come from the job, so they are the same each time.

        Raises JobRejected for a job that can never run as it is (bad body, unknown model), AdmissionError for one that cannot
        run now.
        """
