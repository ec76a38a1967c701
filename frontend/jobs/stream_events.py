"""Writes the stored events of a durable stream as server-sent events with ids. Pure."""

from __future__ import annotations

import msgspec

from headrace.broker.durable.reader import Stretch
from headrace.broker.errors import DeadlineExceeded, JobError, JobFailed, JobWithdrawn, PoisonJob
from headrace.broker.ingress.stream import fault_error
from headrace.broker.messages import JobFault, JobStatus
from headrace.frontend.errors import FrontendError, translate
from headrace.frontend.jobs.stream_names import event_id
from headrace.frontend.writers.sse import DONE

_TYPED = b'{"type":"'  # events of the Responses API and their like have their name in their data, and no mark of the end

_REASONS: dict[str, tuple[type[JobError], str]] = {
    "cancelled": (JobWithdrawn, "the request was cancelled by a call"),
    "expired": (DeadlineExceeded, "the request did not finish before its deadline"),
    "poison": (PoisonJob, "the request crashes its workers and was taken out of service"),
}


class EventLines:
    """Writes stretches of one stream in order."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._typed = False

    def write(self, stretch: Stretch) -> bytes:
        """Return a stretch as server-sent events; with its end those that a client needs to know it by."""
        out = [self._event(stretch.first + i, data) for i, data in enumerate(stretch.events)]
        if stretch.end is not None:
            out.append(self._closing(stretch))
        return b"".join(out)

    def _event(self, number: int, data: bytes) -> bytes:
        name = event_id(self._token, number)
        if data.startswith(_TYPED):
            self._typed = True
            kind = data[len(_TYPED) : data.index(b'"', len(_TYPED))]
            return b"id: %b\nevent: %b\ndata: %b\n\n" % (name, kind, data)
        return b"id: %b\ndata: %b\n\n" % (name, data)

    def _closing(self, stretch: Stretch) -> bytes:
        end = stretch.end
        assert end is not None  # noqa: S101  # the caller asked
        if end.status == "done":
            return b"" if self._typed else DONE
        if stretch.events:  # the carrier's, of which the last one says what happened
            return b""
        error = error_of(end.status, end.fault)
        if self._typed:
            data = msgspec.json.encode(
                {"type": "error", "code": error.code, "message": str(error), "param": None, "sequence_number": stretch.first}
            )
            return b"event: error\ndata: %b\n\n" % data
        return b"data: " + error.body() + b"\n\n"


def error_of(status: JobStatus | None, fault: JobFault | None = None, message: str = "") -> FrontendError:
    """Return the error of a job that has ended without an answer, in the words of `message` if there are some."""
    if fault is not None:
        return translate(fault_error(fault))
    kind, words = _REASONS.get(status or "", (JobFailed, f"the request has ended as {status}"))
    return translate(kind(message or words))
