"""The durable consumers that one worker reads, made at its start and whenever one is missing."""

from __future__ import annotations

from headrace.broker.prefill.server import PrefillServer
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.subjects import REQUEST_CLASSES
from headrace.jetstream.topology import request_consumer, work_consumer


class WorkerConsumers:
    """The pool's consumers of REQ, the worker's own of WORK and, for a prefill worker, of PREFILL."""

    def __init__(self, deps: WorkerDeps, state: WorkerState, prefill: PrefillServer | None) -> None:
        self._messaging = deps.messaging
        self._state = state
        self._prefill = prefill
        self._requests = [request_consumer(deps.subjects, state.pool, name) for name in REQUEST_CLASSES]
        self.work = work_consumer(deps.subjects, state.pool, state.worker, deps.secret)

    async def ensure(self) -> None:
        """Make the consumers, or update them. Raises JetStreamError."""
        for consumer in (*self._requests, self.work):
            await self._messaging.ensure_consumer(consumer)
        if self._prefill is not None and not self._state.member.serves:
            await self._prefill.ensure_consumers()

    async def forget(self) -> None:
        """Delete the worker's own consumers, which it reads no more. Raises JetStreamError."""
        await self._messaging.delete_consumer(self.work.stream, self.work.name)
        if self._prefill is not None:
            await self._prefill.forget_consumer()
