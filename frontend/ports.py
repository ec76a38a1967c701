"""What the HTTP surface needs of the broker, as protocols.

`headrace.broker.ingress.ingress.Ingress` is the real thing; unit tests bring a fake.  Keeping the list here shows how
narrow the seam is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from headrace.broker.ingress.response_store import StoredResponse
from headrace.broker.jobs import Job
from headrace.broker.messages import Explanation, Row
from headrace.broker.models.cards import ModelCard


class Served(Protocol):
    """A model with a card. `workers` counts those that are live, ready and not draining."""

    @property
    def card(self) -> ModelCard: ...
    @property
    def files(self) -> Mapping[str, bytes]: ...
    @property
    def workers(self) -> int: ...
    @property
    def adapter(self) -> str | None:
        """None is the model itself."""


class Models(Protocol):
    """The models with a card, ready or not."""

    def names(self) -> list[str]: ...
    def ready_names(self) -> list[str]: ...
    def adapters(self) -> list[str]:
        """Those that some worker has."""

    def get(self, name: str) -> Served:
        """Resolves aliases and adapters. Raises UnknownModel."""

    def on_change(self, callback: Callable[[], None]) -> None: ...


class JobAnswer(Protocol):
    """The rows of one job (`headrace.broker.ingress.ingress.JobStream`)."""

    async def rows(self) -> list[Row]:
        """At least one row, in order per choice; none once the job has ended. Cancelling the wait loses no row.

        Raises a JobError when the job ended badly, after the rows before that were returned.
        """

    def cancel(self) -> None:
        """Idempotent; nothing happens once the job has ended."""


class UnaryAnswer(JobAnswer, Protocol):
    """One that can hand its rows on without waking its reader."""

    async def pass_to(self, sink: Callable[[list[Row]], bool], /) -> None:
        """Give rows to `sink` as they come, until it returns False or the answer has ended; `rows` tells the rest.

        Raises what `sink` raises. Cancelling the wait loses no row.
        """


class ResponsePort(Protocol):
    """`headrace.broker.ingress.response_store.ResponseStore` as the Responses API sees it."""

    async def put(self, response: StoredResponse, /) -> None:
        """Raises ResponseNotStored."""

    async def get(self, response_id: str, tenant: str, /) -> StoredResponse:
        """Raises ResponseUnknown, or a JetStreamError when the store cannot be reached."""

    async def get_all(self, response_ids: Sequence[str], tenant: str, /) -> list[StoredResponse]:
        """In the order of the ids. Raises as `get`."""

    async def delete(self, response_id: str, tenant: str, /) -> None:
        """Raises as `get`."""


class JobPort(Protocol):
    """`headrace.broker.ingress.ingress.Ingress` as the routes see it."""

    @property
    def id(self) -> str:
        """This ingress among all of them."""

    @property
    def ready(self) -> bool: ...
    @property
    def trouble(self) -> str:
        """Why it is not ready, as the end of a sentence; nothing when it is."""

    @property
    def models(self) -> Models: ...
    async def submit(self, job: Job, /) -> JobAnswer:
        """Raises an AdmissionError. Cancelling the wait withdraws the job."""

    async def cancel(self, name: str, tenant: str, /, *, timeout_s: float) -> bool:
        """End a request by its id or by what its client called it; False when none is open. Raises BrokerUnavailable."""

    async def judge_gone(self, ingress: str, /) -> bool:
        """The verdict that this ingress is dead. False while it cannot be known."""

    async def explain(self, request_id: str, *, timeout_s: float) -> Explanation:
        """Why a job with `explain` was placed where it is. Never raises for what is not known."""
