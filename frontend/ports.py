"""Ports between the HTTP surface and the broker, as protocols.

`headrace.broker.ingress.ingress.Ingress` implements `JobPort`; unit tests bring a fake. The list shows how narrow the seam is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from headrace.broker.durable.stored_job import NewJob
from headrace.broker.durable.stored_jobs import Stretch
from headrace.broker.ingress.response_store import StoredResponse
from headrace.broker.ingress.timeline import RequestTimeline
from headrace.broker.jobs import Job
from headrace.broker.messages.control import Explanation
from headrace.broker.messages.durable import JobResult, ResultResponse
from headrace.broker.messages.frames import Row
from headrace.broker.models.cards import ModelCard


class Served(Protocol):
    """A model with a card. `workers` counts the workers that are live, ready and not draining."""

    @property
    def name(self) -> str:
        """Return the name that it was looked up by: the model's own, an alias or an adapter."""

    @property
    def card(self) -> ModelCard: ...
    @property
    def files(self) -> Mapping[str, bytes]: ...
    @property
    def workers(self) -> int: ...
    @property
    def adapter(self) -> str | None:
        """Return the adapter's name; None for the model itself."""


class Models(Protocol):
    """The directory of the models that have a card, ready or not."""

    def names(self) -> list[str]: ...
    def ready_names(self) -> list[str]: ...
    def offered_names(self) -> list[str]:
        """Return the names of the models that have a ready worker or had one lately."""

    def listed_names(self) -> list[str]:
        """Return the names of models, aliases and adapters that have a ready worker."""

    def get(self, name: str) -> Served:
        """Look up a model by its name, an alias or an adapter. Raises UnknownModel."""

    def on_change(self, callback: Callable[[], None]) -> None: ...


class JobAnswer(Protocol):
    """The rows of one job, or of several."""

    async def rows(self) -> list[Row]:
        """Wait for at least one row, in order per choice; return none once the job has ended. Cancelling loses no row.

        Raises a JobError if the job failed, after the rows before that were returned.
        """

    def cancel(self) -> None:
        """Cancel the job. Idempotent; without effect once the job has ended."""


class SubmittedAnswer(JobAnswer, Protocol):
    """The rows of one job (`headrace.broker.ingress.stream.JobStream`)."""

    @property
    def timeline(self) -> RequestTimeline | None: ...


class ResponsePort(Protocol):
    """`headrace.broker.ingress.response_store.ResponseStore` as the Responses API sees it."""

    async def put(self, response: StoredResponse, /) -> None:
        """Store a response. Raises ResponseNotStored."""

    async def get(self, response_id: str, tenant: str, /) -> StoredResponse:
        """Read a response. Raises ResponseUnknown, or a JetStreamError if the store cannot be reached."""

    async def get_all(self, response_ids: Sequence[str], tenant: str, /) -> list[StoredResponse]:
        """Read responses, in the order of their ids. Raises as `get`."""

    async def delete(self, response_id: str, tenant: str, /) -> None:
        """Delete a response. Raises as `get`."""


class RecordPort(Protocol):
    """`headrace.broker.ingress.response_store.RecordIndex` as the APIs with stored objects see it."""

    async def put(self, kind: str, tenant: str, name: str, value: bytes, /) -> None:
        """Write a record, new or not. Raises ResponseNotStored."""

    async def get(self, kind: str, tenant: str, name: str, /) -> bytes | None:
        """Return a record, None if there is none. Raises a JetStreamError."""

    async def change(self, kind: str, tenant: str, name: str, change: Callable[[bytes], bytes], /) -> bytes | None:
        """Replace a record by what `change` makes of it; None if there is none. Raises as `change`, and a JetStreamError."""

    async def delete(self, kind: str, tenant: str, name: str, /) -> None:
        """Delete a record; an absent one is fine. Raises a JetStreamError."""

    async def list(self, kind: str, tenant: str, /) -> list[bytes]:
        """Return all records of a kind, in no order. Raises a JetStreamError."""


class EventSource(Protocol):
    """`headrace.broker.durable.stored_jobs.EventFollow`: the events of a stored job, for one reader."""

    async def next(self) -> Stretch:
        """Wait for more events, or the end. May be cancelled and called again. Raises StreamIncomplete, JetStreamError."""

    async def close(self) -> None:
        """Stop reading."""


class StoredJobPort(Protocol):
    """`headrace.broker.durable.stored_jobs.StoredJobs` as the routes of durable answers see it. A job is named by its token."""

    async def publish(self, job: NewJob, /) -> None:
        """Store a job. Raises an AdmissionError, after which it may be stored all the same, and JobNameReused."""

    async def check_request(self, tenant: str, token: str, digest: str, /) -> None:
        """Raise JobNameReused if the stored job is known to be that of another request, BrokerUnavailable."""

    def events(self, tenant: str, token: str, /, *, first: int = 0) -> EventSource:
        """Return a reader of a job's events from number `first` on."""

    async def begun(self, tenant: str, token: str, /) -> bool:
        """Return whether a carrier has taken the job's stream. Raises a JetStreamError."""

    async def known(self, tenant: str, token: str, /) -> JobResult | None:
        """Return the result of a job, None if none is seen. Raises a JetStreamError."""

    async def result(self, tenant: str, token: str, /) -> JobResult:
        """Wait for the result of a job. Raises a JetStreamError."""

    async def response(self, result: JobResult, /) -> ResultResponse | None:
        """Return the answer of a result; None if there is none. Raises a JetStreamError, WireError."""

    async def drop(self, result: JobResult, /) -> None:
        """Delete the large answer of a result; the result itself stays. Raises a JetStreamError."""

    async def cancel(self, tenant: str, token: str, /) -> None:
        """Cancel a job that a frontend named, and return once it has an end. It tries until it is cancelled."""


class JobPort(Protocol):
    """`headrace.broker.ingress.ingress.Ingress` as the routes see it."""

    @property
    def id(self) -> str:
        """Return the id of this ingress, unique in the deployment."""

    @property
    def ready(self) -> bool: ...
    @property
    def trouble(self) -> str:
        """Return why this ingress is not ready, as the end of a sentence; empty if it is ready."""

    @property
    def storing(self) -> bool:
        """Return False if the broker is known to store no messages, and True while it is away for a moment."""

    @property
    def models(self) -> Models: ...
    async def submit(self, job: Job, /) -> SubmittedAnswer:
        """Submit a job. Cancelling the wait withdraws it. Raises an AdmissionError."""

    async def cancel(self, name: str, tenant: str, /, *, timeout_s: float) -> bool:
        """Cancel a request by its id or by its client's name for it; False if none is open. Raises BrokerUnavailable."""

    async def judge_gone(self, ingress: str, /) -> bool:
        """Return True if this ingress is known to be dead, False also while that cannot be known."""

    async def explain(self, request_id: str, *, timeout_s: float) -> Explanation:
        """Return why a job was placed on its worker. Unknown parts are left out and raise nothing."""
