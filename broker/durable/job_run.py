"""A stored job from its take to its end: rendered, submitted under this ingress as its judge, and answered.

A plain job's rows go into its answer as they come. A durable stream's rows are appended first, several at a time, and its state
is folded again whenever it is submitted anew: rows that were not appended never existed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import structlog

from headrace.base.errors import HeadraceError
from headrace.broker.durable import metrics
from headrace.broker.durable.errors import CarrierLost, DurableError, JobRejected
from headrace.broker.durable.held_job import CarrierDeps, HeldJob, known
from headrace.broker.durable.job_end import JobEnder
from headrace.broker.durable.names import run_id
from headrace.broker.durable.results import TEXTS, rejected
from headrace.broker.durable.stored_job import RenderedJob
from headrace.broker.durable.stream_writer import end_of, fault_of, read_stream
from headrace.broker.errors import AdmissionError, JobError, RequestTooLarge
from headrace.broker.ingress.stream import JobStream
from headrace.broker.jobs import Job
from headrace.broker.messages.control import HistoryEntry
from headrace.broker.messages.frames import JobFault, Row
from headrace.broker.protocol.resume import Resume


class RowBuffer:
    """The rows of all requests of a job in the order in which they came, with choices that count over all requests."""

    def __init__(self, wake: asyncio.Event, on_rows: Callable[[list[Row]], object] | None) -> None:
        """`on_rows`: takes rows at once, so that the loop is not woken for each of them; otherwise they wait for it."""
        self.rows: list[Row] = []
        self.open = 0  # requests that have not ended; the caller of `read` counts them in
        self.error: JobError | None = None
        self._wake = wake
        self._on_rows = on_rows

    async def read(self, stream: JobStream, first_choice: int) -> None:
        """Read one request to its end. `first_choice`: the number of choices of the requests before it."""

        def sink(rows: list[Row]) -> bool:
            moved = [msgspec.structs.replace(row, choice=row.choice + first_choice) for row in rows] if first_choice else rows
            if self._on_rows is not None:
                self._on_rows(moved)
            else:
                self.rows += moved
                self._wake.set()
            return True

        try:
            await stream.deliver_to(sink)
            while not stream.finished and (rows := await stream.rows()):
                sink(rows)
        except JobError as error:
            self.error = self.error or error
        finally:
            self.open -= 1
            self._wake.set()


class CrashWriter:
    """Implements `CrashRecorder` for one run of a job; the run's own loop writes what is due."""

    def __init__(self, deps: CarrierDeps, held: HeldJob) -> None:
        self._deps = deps
        self._held = held
        self._stored = set(held.stored.history)
        self._due: set[HistoryEntry] = set()

    def recorded(self, crashes: Sequence[HistoryEntry]) -> bool:
        """Return whether all of these are stored. Those that are not will be."""
        missing = set(crashes) - self._stored
        if missing - self._due:
            self._due |= missing
            self._held.rouse()
        return not missing

    async def write(self) -> None:
        """Append the crashes that are not stored yet. Raises CarrierLost for a durable stream that another writes."""
        while self._due:
            due = sorted(self._due)
            try:
                await self._held.writer.append("crash", history=due)
            except CarrierLost:
                if self._held.job.durable:
                    raise
                await self._read_on()  # copies of a plain job may run beside each other: its result decides
                if self._held.stop:
                    return
            else:
                self._stored.update(due)
                self._held.stored.history += [crash for crash in due if crash not in self._held.stored.history]
                self._due.difference_update(due)

    async def _read_on(self) -> None:
        job, retry_s = self._held.job, self._deps.settings.timing.retry_s
        await asyncio.sleep(retry_s)
        state = await known(
            lambda: read_stream(self._deps.messaging, self._deps.subjects, job.tenant, job.token),
            what="stream",
            retry_s=retry_s,
        )
        if state.end is not None:  # a canceller's: nothing may follow it
            self._held.halt(state.end.status or "cancelled")
        elif state.last_seq > self._held.writer.last_seq:
            self._held.writer.continue_from(state)


log = structlog.get_logger()

READ_AGAIN_S = 10.0  # for reads that are older than what was written here, before it is asked whether that is lost


class TryLater(Exception):
    """The pool or the broker refuses this job for the moment."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class JobRunner:
    def __init__(self, deps: CarrierDeps, ender: JobEnder, on_refused: Callable[[], None]) -> None:
        self._deps = deps
        self._ender = ender
        self._on_refused = on_refused

    async def run(self, held: HeldJob) -> bool:
        """Run a job to its end. Returns True once it is acked, False if it is left to another carrier."""
        settings = self._deps.settings
        wait_s, tries = settings.retry_s, 0
        while True:
            try:
                return await self._attempt(held, tries)
            except CarrierLost:
                return await self._ender.lost(held)
            except TryLater as later:
                metrics.RETRIED.labels(later.reason).inc()
                log.info("job.retry", stored_job=held.job.id, reason=later.reason, wait_s=wait_s)
            await self._pause(held, wait_s)
            wait_s = min(wait_s * 2, settings.longest_retry_s)
            tries += 1
            if held.job.durable:
                await self._read_again(held)

    async def _pause(self, held: HeldJob, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        while not held.stop and loop.time() < until:
            held.wake.clear()
            try:
                async with asyncio.timeout_at(until):
                    await held.wake.wait()
            except TimeoutError:
                return

    async def _read_again(self, held: HeldJob) -> None:
        """Fold the stream again, as far as it was written here, unless the job has to end or that is lost.

        With lost entries the answer goes on from those that are left, and readers find that some are missing.
        """
        job, retry_s = held.job, self._deps.settings.timing.retry_s
        loop = asyncio.get_running_loop()
        patient_until = loop.time() + READ_AGAIN_S
        while not held.stop:
            state = await known(
                lambda: read_stream(self._deps.messaging, self._deps.subjects, job.tenant, job.token),
                what="stream",
                retry_s=retry_s,
            )
            old = state.last_seq < held.writer.last_seq
            if not old or (loop.time() >= patient_until and await held.writer.gave_up_lost(state.last_seq)):
                held.stored = state
                return
            await asyncio.sleep(retry_s)

    async def _attempt(self, held: HeldJob, tries: int) -> bool:
        """Submit a job once and bring it to its end. Raises TryLater, CarrierLost."""
        if held.stop:
            return await self._stopped(held, None)
        run = run_id(held.job.id, f"{held.nonce}r{tries}" if tries else held.nonce)
        try:
            rendered = await self._deps.renderer.render(held.job, run)
        except JobRejected as error:
            fault = JobFault("rejected", str(error))
            return await self._ender.end_with(held, rejected(held.ref, error, self._deps.wall()), fault=fault)
        except AdmissionError as error:
            raise TryLater(type(error).__name__) from None
        except Exception as error:
            log.exception("job.error", stored_job=held.job.id, tenant=held.job.tenant)
            return await self._failed(held, None, JobFault("internal_error", repr(error)))
        if held.noted and len(held.stored.takes) > 0 and not tries:
            await self._append_ok(held)
        try:
            return await self._carry(held, rendered)
        except (TryLater, DurableError):
            raise
        except HeadraceError as error:
            return await self._failed(held, rendered, JobFault(getattr(error, "code", "engine_error"), str(error)))
        except Exception as error:  # a fault in the code that makes answers must end this job and no other one
            log.exception("job.error", stored_job=held.job.id, tenant=held.job.tenant)
            return await self._failed(held, None, JobFault("internal_error", repr(error)))

    async def _append_ok(self, held: HeldJob) -> None:
        try:
            await held.writer.append("ok")
        except CarrierLost:
            if held.job.durable:
                raise

    async def _carry(self, held: HeldJob, rendered: RenderedJob) -> bool:
        for entry in held.stored.entries:
            rendered.take(entry.rows)
        crashes = CrashWriter(self._deps, held)
        if rendered.open and len(rendered.requests) == 1 and not held.job.durable:
            return await self._carry_plain(held, rendered, crashes)
        buffer = RowBuffer(held.wake, None if held.job.durable else rendered.take)
        streams: list[JobStream] = []
        reading: list[asyncio.Task[None]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                if rendered.open:
                    first_choice = 0
                    for request in rendered.requests:
                        stream = await self._submit(held, request, crashes)
                        streams.append(stream)
                        buffer.open += 1
                        reading.append(tasks.create_task(buffer.read(stream, first_choice)))
                        first_choice += request.choices
                try:
                    return await self._follow(held, rendered, crashes, buffer)
                finally:
                    for task in reading:
                        task.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            for stream in streams:
                stream.cancel()

    async def _carry_plain(self, held: HeldJob, rendered: RenderedJob, crashes: CrashWriter) -> bool:
        """Carry a plain job of one request, as nearly all are: this task takes its rows itself. Raises TryLater."""

        def sink(rows: list[Row]) -> bool:
            rendered.take(rows)
            return True

        stream = await self._submit(held, rendered.requests[0], crashes)
        held.rendered, held.on_wake = rendered, stream.let_go
        self._deps.notices.step(held.ref, "started")
        try:
            while True:
                await crashes.write()
                if held.stop:
                    return await self._stopped(held, rendered)
                if stream.ended:
                    break
                await stream.deliver_to(sink)
            while not stream.finished and (rows := await stream.rows()):
                rendered.take(rows)
        except JobError as error:
            return await self._faulted(held, rendered, error, [])
        finally:
            held.on_wake = None
            stream.cancel()
        return await self._ender.end(held, "done", rendered=rendered, events=await rendered.finish())

    async def _submit(self, held: HeldJob, request: Job, crashes: CrashWriter) -> JobStream:
        state, choices = held.stored, request.choices
        resume = Resume(emitted=state.emitted_of(choices), finished=state.finished_of(choices), history=state.history)
        left_s = max(0.0, held.job.deadline - self._deps.wall())
        try:
            return await self._deps.ingress.submit(
                msgspec.structs.replace(request, deadline_s=left_s), resume=resume, recorder=crashes
            )
        except RequestTooLarge:
            raise
        except AdmissionError as error:
            self._on_refused()
            raise TryLater(type(error).__name__) from None

    async def _follow(self, held: HeldJob, rendered: RenderedJob, crashes: CrashWriter, buffer: RowBuffer) -> bool:
        """Take rows and write entries until the job ends. Raises TryLater, CarrierLost."""
        held.rendered = rendered
        self._deps.notices.step(held.ref, "started")
        gap_s = self._deps.settings.entry_gap_s
        while not held.stop:
            held.wake.clear()
            await crashes.write()
            if buffer.error is not None:
                rows, buffer.rows = buffer.rows, []
                return await self._faulted(held, rendered, buffer.error, rows)
            if not buffer.open:
                break
            if buffer.rows:
                await self._append_rows(held, rendered, buffer)
                await asyncio.sleep(gap_s)
            else:
                await held.wake.wait()
        if held.stop:
            return await self._stopped(held, rendered)
        while len(buffer.rows) > self._deps.settings.entry_rows:
            await self._append_rows(held, rendered, buffer)
        rows, buffer.rows = buffer.rows, []
        events = rendered.take(rows) if rows else []
        events += await rendered.finish()
        return await self._ender.end(held, "done", rendered=rendered, rows=_bare(rows), events=events)

    async def _append_rows(self, held: HeldJob, rendered: RenderedJob, buffer: RowBuffer) -> None:
        most = self._deps.settings.entry_rows
        rows, buffer.rows = buffer.rows[:most], buffer.rows[most:]
        events = rendered.take(rows)
        await held.writer.append("rows", rows=_bare(rows), events=events, first_event=held.stored.events if events else 0)
        held.stored.events += len(events)

    async def _faulted(self, held: HeldJob, rendered: RenderedJob, error: JobError, rows: list[Row]) -> bool:
        """End a job whose request has failed; `rows` were not taken yet. Raises TryLater."""
        emitted = held.job.durable and (bool(held.stored.events) or bool(held.stored.emitted))
        status = end_of(error, emitted=emitted)
        if status == "retry":
            raise TryLater(fault_of(error).code)
        fault = fault_of(error)
        events = (rendered.take(rows) if held.job.durable and rows else []) + rendered.fail(fault)
        return await self._ender.end(held, status, rendered=rendered, rows=_bare(rows), events=events, fault=fault)

    async def _failed(self, held: HeldJob, rendered: RenderedJob | None, fault: JobFault) -> bool:
        events = rendered.fail(fault) if rendered is not None else []
        return await self._ender.end(held, "failed", rendered=rendered, events=events, fault=fault)

    async def _stopped(self, held: HeldJob, rendered: RenderedJob | None) -> bool:
        stop = held.stop
        if stop == "seen":
            job = held.job
            result = await known(
                lambda: self._deps.results.get(job.tenant, job.token), what="result", retry_s=self._deps.settings.retry_s
            )
            if result is not None:
                self._ender.settle(held, result)
                return True
            return await self._ender.lost(held)
        if stop == "" or stop == "lost":
            return await self._ender.lost(held)
        fault = JobFault("deadline_exceeded" if stop == "expired" else "cancelled", TEXTS.get(stop, f"the job was {stop}"))
        events = rendered.fail(fault) if rendered is not None else []
        return await self._ender.end(held, stop, rendered=None, events=events, fault=fault)


def _bare(rows: list[Row]) -> list[Row]:
    return [msgspec.structs.replace(row, id="") for row in rows]
