"""Writes the answer of a stored job from its rows, as a whole or as the events of a durable stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from headrace.broker.durable.stored_job import StoredJob
from headrace.broker.ingress.stream import fault_error
from headrace.broker.jobs import Job
from headrace.broker.messages import JobFault, ResultResponse, ResultTokens, Row
from headrace.frontend.errors import ErrorForm, FrontendError, StatusForm, translate
from headrace.frontend.generation.plan import Plan
from headrace.frontend.metrics import Metrics
from headrace.frontend.writers.base import StreamWriter, WholeWriter

Charge = Callable[[str, int, int], None]

_EVENT_END = b"\n\n"
_DATA = b"data: "
_DONE = b"[DONE]"


class RenderedAnswer:
    """A job that one of the APIs has planned, and the writer of its answer."""

    def __init__(
        self,
        job: StoredJob,
        plan: Plan,
        requests: Sequence[Job],
        form: ErrorForm,
        metrics: Metrics,
        *,
        charge: Charge | None = None,
    ) -> None:
        """`requests` are those of the plan, with the options of the stored job. `charge` takes the tenant, the
        tokens of its prompt and those of its answer.
        """
        self._charge = charge
        self._metrics = metrics
        self.requests = requests
        self._job = job
        self._writer = plan.writer
        self._whole: WholeWriter | None = plan.writer if isinstance(plan.writer, WholeWriter) else plan.whole
        self._counter = plan.counter
        self._form = form
        self._error: FrontendError | None = None

    @property
    def open(self) -> bool:
        """True while more rows are needed."""
        return self._error is None and self._writer.open > 0

    def take(self, rows: list[Row]) -> list[bytes]:
        """Take rows. Returns the events that they make for the clients of a durable stream; a plain job makes none."""
        writer = self._writer
        if not isinstance(writer, StreamWriter):
            writer.take(rows)
            return []
        if self._whole is not None:
            self._whole.take(rows)
        return events_of(writer.events(rows))

    async def finish(self) -> list[bytes]:
        """Do what is left after the last row and return the last events. Raises as the writer does."""
        writer = self._writer
        if writer.unsettled:
            await writer.settle()
        return events_of(writer.closing()) if isinstance(writer, StreamWriter) else []

    def fail(self, fault: JobFault) -> list[bytes]:
        """End the answer with a fault. Returns the last events."""
        self._error = error = translate(fault_error(fault))
        return events_of(self._writer.failure(error)) if isinstance(self._writer, StreamWriter) else []

    def response(self) -> ResultResponse:
        """Return the whole answer; after `fail` the error in the form of its API."""
        if self._error is not None:
            status = self._form.status(self._error) if isinstance(self._form, StatusForm) else self._error.status
            return self._answer(status, self._form(self._error))
        assert self._whole is not None  # noqa: S101  # the renderer refuses streams without it
        return self._answer(200, self._whole.body())

    def _answer(self, status: int, body: bytes) -> ResultResponse:
        return ResultResponse(status_code=status, request_id=self._job.id, body=msgspec.Raw(body))

    @property
    def tokens(self) -> ResultTokens:
        """The tokens counted so far."""
        counter = self._counter
        return ResultTokens(
            prompt=counter.prompt,
            cached=counter.cached,
            completion=counter.completion,
            reasoning=counter.reasoning or 0,
        )

    def settled(self) -> None:
        """Count the tokens of a job whose result was seen."""
        counter = self._counter
        if counter.completion or counter.ended:
            model = self.requests[0].card.model
            self._metrics.count_tokens(
                model, prompt=counter.prompt, cached=counter.cached, output=counter.completion, source="job"
            )
            if self._charge is not None:
                self._charge(self.requests[0].tenant, counter.prompt, counter.completion)


def events_of(stream: bytes) -> list[bytes]:
    """Return the JSON of the events of a stream. The mark of its end is none: readers add it."""
    found = [event.partition(_DATA)[2] for event in stream.split(_EVENT_END) if event]
    return [data for data in found if data and data != _DONE]
