"""Runs responses in the background: `background: true` is answered at once, and the response outlives its connection.

Its record is in the store from the beginning: `queued`, then `in_progress`, then its final status with all events, so any
ingress can report its state. The ingress that accepted it runs it, is the judge of its job, and keeps its events until they are
stored. If that ingress dies, its job is cancelled like all its work. The next ingress that reads the record finds the lease
gone and closes the record as failed.

The store may lose records of responses that are being made, when its stream is deleted.  The ingress that makes one answers
from memory, and after each reconnect writes its records again, for the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import structlog

from headrace.broker.errors import JobWithdrawn, ResponseNotStored
from headrace.broker.ingress.response_store import StoredResponse
from headrace.frontend.errors import Draining, FrontendError, translate
from headrace.frontend.generation.endpoint import Incomplete
from headrace.frontend.generation.plan import Plan
from headrace.frontend.metrics import Metrics
from headrace.frontend.ports import JobAnswer, JobPort, ResponsePort
from headrace.frontend.responses.answer import ResponseAnswer, ResponseFault
from headrace.frontend.responses.eventlog import EventLog, unpacked
from headrace.frontend.responses.writers import BackgroundEvents
from headrace.jetstream.errors import HeadraceError
from headrace.jetstream.tasks import TaskScope

log = structlog.get_logger()

MOST_AT_ONCE = 1024
STORE_AGAIN_S = 1.0
STORE_TRIES = 30
LAST_WORDS_S = 2.0  # to store a response when the process ends
POLL_S = 0.25  # between reads of a record that another ingress will change
CANCEL_S = 5.0  # for another ingress to close a response after its cancellation
PACKING_RATIO = 8  # limit on the events as a multiple of the record's, because events repeat everything and compress well

ENDED = frozenset({"completed", "incomplete", "failed", "cancelled"})

MakeRecord = Callable[[ResponseAnswer], StoredResponse]


class TooManyInBackground(FrontendError, status=429, code="too_many_in_background", retriable=True):
    """The ingress runs the maximum of background responses."""


@dataclass(slots=True, eq=False)
class _Running:
    response: ResponseAnswer
    record: MakeRecord
    writer: BackgroundEvents
    log: EventLog
    plan: Plan
    task: asyncio.Task[None] | None = None
    cancelled: bool = False
    closing: bool = False  # its final record is being written: no other may follow
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


class Background:
    """The background responses of one ingress, with access to those of others. Responses start only while `run` runs."""

    def __init__(self, store: ResponsePort, port: JobPort, metrics: Metrics, *, max_bytes: int) -> None:
        """`max_bytes` is the limit of a stored record."""
        self._store = store
        self._port = port
        self._metrics = metrics
        self._max_events = PACKING_RATIO * max_bytes
        self._running: dict[str, _Running] = {}
        self._tasks = TaskScope()

    async def run(self) -> None:
        """Run until cancelled. Responses that are still running then end as failed."""
        async with self._tasks:
            await asyncio.get_running_loop().create_future()

    async def start(self, plan: Plan, writer: BackgroundEvents, response: ResponseAnswer, record: MakeRecord) -> EventLog:
        """Store a queued response, start it, and return its events.

        Raises TooManyInBackground, ResponseNotStored, Draining, an AdmissionError.
        """
        if not self._tasks.is_open:
            raise _stopped()
        if len(self._running) >= MOST_AT_ONCE:
            raise TooManyInBackground(f"{len(self._running)} responses are being made in the background", retry_after_s=1.0)
        one = _Running(response, record, writer, EventLog(self._max_events), plan)
        self._running[response.id] = one
        try:
            await self._store.put(self._record(one))
            answer = await self._port.submit(plan.jobs[0])
            one.log.add(writer.queued())
            try:
                one.task = self._tasks.spawn(self._run(one, answer))
            except RuntimeError:  # the process is shutting down
                answer.cancel()
                raise _stopped() from None
        except BaseException:
            self._running.pop(response.id)
            with contextlib.suppress(HeadraceError):
                await self._store.delete(response.id, self._record(one).tenant)
            raise
        self._metrics.background.inc()
        return one.log

    def _record(self, one: _Running) -> StoredResponse:
        return msgspec.structs.replace(one.record(one.response), judge=self._port.id)

    # -- running a response ----------------------------------------------------------------------------------

    async def _run(self, one: _Running, answer: JobAnswer) -> None:
        try:
            await self._read(one, answer)
        except asyncio.CancelledError:
            answer.cancel()
            if not one.cancelled:  # the process is shutting down
                await self._close(one, translate(_stopped()), within_s=LAST_WORDS_S)
                raise
            await self._close(one, None)
        except Exception as error:
            seen = translate(error)
            if type(seen) is FrontendError:
                log.error("background.crashed", response=one.response.id, exc_info=error)
            one.cancelled = isinstance(error, JobWithdrawn)  # by another ingress, or by its request id
            await self._close(one, None if one.cancelled else seen)
        else:
            await self._close(one, None)
        finally:
            answer.cancel()
            self._running.pop(one.response.id, None)
            self._metrics.background.dec()
            counter = one.plan.counter
            self._metrics.count_tokens(
                one.response.model, prompt=counter.prompt, cached=counter.cached, output=counter.completion
            )

    async def _read(self, one: _Running, answer: JobAnswer) -> None:
        begun: asyncio.Task[None] | None = None
        try:
            while one.writer.open:
                rows = await answer.rows()
                if not rows:
                    raise Incomplete
                one.log.add(one.writer.events(rows))
                if begun is None and one.writer.open:
                    begun = self._tasks.spawn(self._store_begun(one))
        finally:
            if begun is not None:  # otherwise its write could overwrite the final record
                await asyncio.wait([begun])

    async def _store_begun(self, one: _Running) -> None:
        with contextlib.suppress(ResponseNotStored):  # the record then stays queued a little longer
            await self._write_open(one)

    async def _write_open(self, one: _Running) -> None:
        async with one.writing:
            if not one.closing:
                await self._store.put(self._record(one))

    async def store_again(self) -> None:
        """Write the records of all responses that are being made, because the store may have lost them.

        Tries for half a minute each; failing that, only this ingress can answer for the response until it has ended.
        """
        await asyncio.gather(*(self._store_again(one) for one in list(self._running.values()) if one.task))

    async def _store_again(self, one: _Running) -> None:
        for _ in range(STORE_TRIES):
            try:
                await self._write_open(one)
            except ResponseNotStored as error:
                log.info("response.not_stored", response=one.response.id, reason=error.reason, error=str(error))
            else:
                return
            await asyncio.sleep(STORE_AGAIN_S)
        log.warning("background.not_stored", response=one.response.id, reason="lost")

    async def _close(self, one: _Running, error: FrontendError | None, *, within_s: float | None = None) -> None:
        """Add the last event and store the final record."""
        if one.cancelled:
            one.log.add(one.writer.cancelled())
        elif error is not None:
            one.log.add(one.writer.failure(error))
        else:
            await one.writer.settle()
            one.log.add(one.writer.closing())
        try:
            async with asyncio.timeout(within_s):
                await self._store_ended(one)
        except TimeoutError:
            log.warning("background.not_stored", response=one.response.id, reason="shutdown")
        finally:
            one.log.end()
        log.info("background.ended", response=one.response.id, status=one.response.status)

    async def _store_ended(self, one: _Running) -> None:
        one.closing = True
        async with one.writing:
            await self._store_final(one)

    async def _store_final(self, one: _Running) -> None:
        record = one.record(one.response)
        record = msgspec.structs.replace(record, events=await asyncio.to_thread(one.log.packed))
        for attempt in range(STORE_TRIES):
            try:
                await self._store.put(record)
            except ResponseNotStored as error:
                self._metrics.stored.labels(error.reason).inc()
                log.warning(
                    "response.not_stored", response=record.id, reason=error.reason, error=str(error), attempt=attempt + 1
                )
                if error.reason != "too_large":
                    await asyncio.sleep(STORE_AGAIN_S)
                elif record.events:
                    record = msgspec.structs.replace(record, events=b"")
                else:
                    record = _too_large(one, record)
            else:
                self._metrics.stored.labels("stored").inc()
                return

    # -- requests about a response ---------------------------------------------------------------------------

    async def get(self, response_id: str, tenant: str, /) -> StoredResponse:
        """Return the current record of a response. Raises ResponseUnknown, or a JetStreamError."""
        if (running := self._own(response_id, tenant)) is not None:
            return running
        record = await self._store.get(response_id, tenant)
        if (running := self._own(response_id, tenant)) is not None:
            return running
        if record.judge and (record.judge == self._port.id or await self._port.judge_gone(record.judge)):
            record = await self._store.get(response_id, tenant)  # it may have ended between the two reads
            if record.judge and response_id not in self._running:
                record = await self._give_up(record)
        return record

    def _own(self, response_id: str, tenant: str) -> StoredResponse | None:
        """Return the record of a response that this ingress makes for the tenant, from memory."""
        one = self._running.get(response_id)
        record = None if one is None else self._record(one)
        return record if record is not None and record.tenant == tenant else None

    async def _give_up(self, record: StoredResponse) -> StoredResponse:
        answer = msgspec.json.decode(record.answer)
        fault = ResponseFault(code="server_error", message="the server that made this response has died")
        answer |= {"status": "failed", "error": msgspec.to_builtins(fault)}
        closed = msgspec.structs.replace(record, answer=msgspec.json.encode(answer), judge="")
        log.warning("background.orphaned", response=record.id, judge=record.judge)
        with contextlib.suppress(ResponseNotStored):  # the next reader tries again
            await self._store.put(closed)
        return closed

    async def events(self, response_id: str, tenant: str) -> EventLog:
        """Return the events of a background response. If another ingress runs it, wait until it has ended.

        Raises as `get`, and EventsGone.
        """
        while True:
            record = await self.get(response_id, tenant)
            one = self._running.get(response_id)
            if one is not None:
                return one.log
            if not record.judge:
                return await asyncio.to_thread(unpacked, record.events, self._max_events)
            await asyncio.sleep(POLL_S)

    async def cancel(self, response_id: str, tenant: str) -> StoredResponse:
        """Cancel a response; one that has ended does not change. Raises as `get`, and BrokerUnavailable."""
        record = await self.get(response_id, tenant)
        one = self._running.get(response_id)
        if one is not None and one.task is not None:
            await asyncio.sleep(0)  # for its first step: a task that is cancelled before that never runs, and its job goes on
            one.cancelled = True
            one.task.cancel()
            await asyncio.wait([one.task])
            return await self.get(response_id, tenant)
        if record.judge:
            await self._port.cancel(response_id.partition("_")[2], tenant, timeout_s=CANCEL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_S):
                    while (record := await self.get(response_id, tenant)).judge:
                        await asyncio.sleep(POLL_S)
        return record

    async def forget(self, response_id: str, tenant: str) -> None:
        """Cancel a response before its deletion, so that its end does not store it again. Raises as `cancel`."""
        record = await self.get(response_id, tenant)
        if record.judge:
            await self.cancel(response_id, tenant)


def _stopped() -> Draining:
    return Draining("the server that was to make this response was stopped")


def _too_large(one: _Running, record: StoredResponse) -> StoredResponse:
    response = one.response
    response.status, response.output = "failed", []
    response.error = ResponseFault(code="server_error", message="the response is too large to be stored")
    return msgspec.structs.replace(record, answer=msgspec.json.encode(response), output=b"[]", input=b"[]")
