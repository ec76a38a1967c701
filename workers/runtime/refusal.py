"""Ends runs that the engine refuses, and decides which runs cannot be resumed."""

from __future__ import annotations

from headrace.broker.messages import Generation, JobFault
from headrace.broker.protocol.run import Run
from headrace.broker.worker.ports import RunSink
from headrace.workers.engine import Capabilities
from headrace.workers.errors import EngineOverloaded, RequestInvalid, UnsupportedByEngine, WorkerError


def refuse(sink: RunSink, run: Run, error: WorkerError) -> None:
    """End a run with the fault for `error`, or move it to another worker if that may help."""
    if isinstance(error, (RequestInvalid, UnsupportedByEngine)):
        sink.fail(run, JobFault("invalid_request", str(error), param=error.param))
    elif isinstance(error, EngineOverloaded):
        sink.retry_elsewhere(run, JobFault("engine_overloaded", str(error), retriable=True, retry_after_s=1.0))
    elif error.retriable:
        sink.retry_elsewhere(run, JobFault("engine_error", str(error), retriable=True))
    else:
        sink.fail(run, JobFault("engine_error", str(error)))


def cannot_resume(run: Run, generation: Generation, capabilities: Capabilities) -> str | None:
    """Return the reason why a run cannot continue from its emitted tokens, or None if it can or has emitted none.

    An engine continues a request by taking prompt + emitted ids as a forced prefix. State that it keeps beside the tokens is
    lost by that: the position in a grammar, and penalty counts that only cover generated tokens. Such a job ends with a typed
    error instead of silently becoming another answer.
    """
    if not any(log.ids and not log.settled for log in run.choices):
        return None
    if not capabilities.resume:
        return "its worker is gone and this engine cannot continue a partial answer"
    if generation.guided is not None and not capabilities.resume_guided:
        return "its worker is gone and the engine cannot continue structured output in the middle"
    sampling = generation.sampling
    if (sampling.presence_penalty or sampling.frequency_penalty) and not capabilities.resume_penalties:
        return "its worker is gone and the engine cannot carry presence or frequency penalties over"
    if sampling.repetition_penalty != 1 and not capabilities.resume_repetition:
        return "its worker is gone and the engine cannot carry a repetition penalty over"
    return None
