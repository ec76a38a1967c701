"""What the engine does not take, or cannot answer, as the client is told."""

from __future__ import annotations

from headrace.broker.messages import JobFault
from headrace.broker.protocol.run import Run
from headrace.broker.worker.ports import RunSink
from headrace.workers.errors import EngineOverloaded, RequestInvalid, UnsupportedByEngine, WorkerError


def refuse(sink: RunSink, run: Run, error: WorkerError) -> None:
    """End the run, or have it tried elsewhere where that may help."""
    if isinstance(error, (RequestInvalid, UnsupportedByEngine)):
        sink.fail(run, JobFault("invalid_request", str(error), param=error.param))
    elif isinstance(error, EngineOverloaded):
        sink.retry_elsewhere(run, JobFault("engine_overloaded", str(error), retriable=True, retry_after_s=1.0))
    elif error.retriable:
        sink.retry_elsewhere(run, JobFault("engine_error", str(error), retriable=True))
    else:
        sink.fail(run, JobFault("engine_error", str(error)))
