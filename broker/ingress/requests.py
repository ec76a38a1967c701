"""The open requests of an ingress: their table, the messages of their judge, and how the ingress itself ends one.

It ends one that is cancelled by its reader, withdrawn by a call, past its deadline, or not read in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import msgspec
import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, encode, log_ids
from headrace.broker.dead_letters import store_dead_letter
from headrace.broker.errors import BrokerUnavailable, WireError, never_started, unfinished
from headrace.broker.ingress.spill_store import SpillStore
from headrace.broker.ingress.stream import JobStream
from headrace.broker.ingress.timeline import Timelines
from headrace.broker.membership.members import Members
from headrace.broker.messages.control import Abort, Answers, CancelJob, Done, HistoryEntry, RunRef, RunVerdict, Since, SinceItem
from headrace.broker.messages.durable import DeadLetter
from headrace.broker.messages.events import Cancel
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.requests import Envelope, Record
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.judge import Judge
from headrace.broker.protocol.quarantine import Crash
from headrace.broker.settings import IngressSettings
from headrace.jetstream.errors import JetStreamError, NoResponder, PayloadTooLarge, SubjectError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope

log = structlog.get_logger()

TICK_S = 0.25


class OpenRequest(msgspec.Struct, frozen=True):
    """`body` is the stored message; `deadline_s` is loop time, `deadline` Unix time."""

    id: str
    pool: str
    tenant: str
    body: bytes
    stream: JobStream
    deadline_s: float
    deadline: float
    name: str = ""  # the client's own name for the request

    def envelope(self) -> Envelope:
        return decode(Envelope, self.body)


class OpenRequests:
    """The requests that have not ended. The end of one ends its timeline and deletes its spilled payload."""

    def __init__(self, timelines: Timelines, spills: SpillStore) -> None:
        self._timelines = timelines
        self._spills = spills
        self._open: dict[str, OpenRequest] = {}
        self._loop = asyncio.get_running_loop()

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request: OpenRequest) -> None:
        self._open[request.id] = request

    def get(self, request_id: str) -> OpenRequest | None:
        return self._open.get(request_id)

    def find(self, name: str, tenant: str) -> list[OpenRequest]:
        """Return the tenant's requests with this id or name. Searches all of them, because cancelling is rare."""
        return [request for request in self._open.values() if name in (request.id, request.name) and request.tenant == tenant]

    def keep_payload(self, request_id: str) -> None:
        """Keep the spilled payload beyond the end of its request, whose dead letter can be run again."""
        self._spills.keep(request_id)

    def end(self, request_id: str, fault: JobFault | None) -> None:
        if self._open.pop(request_id, None) is not None:
            self._timelines.end(request_id, fault, self._loop.time())
            self._spills.forget(request_id)

    def drop(self, request_id: str) -> None:
        """Forget a request that could not be submitted: it has no timeline."""
        self._open.pop(request_id, None)
        self._timelines.drop(request_id)
        self._spills.forget(request_id)


class JudgeOutbox:
    """The judge's port. `flush` must follow every message that was fed to the judge."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        requests: OpenRequests,
        tasks: TaskScope,
        *,
        retry_s: float,
        wall: Callable[[], float],
    ) -> None:
        """Dead letters are stored in `tasks`, and tried again after `retry_s`."""
        self._messaging = messaging
        self._subjects = subjects
        self._requests = requests
        self._tasks = tasks
        self._retry_s = retry_s
        self._wall = wall
        self._answers: dict[str, list[RunVerdict]] = {}
        self._aborts: dict[str, list[RunRef]] = {}
        self._sinces: dict[str, dict[str, SinceItem]] = {}

    def abort(self, worker: str, ref: RunRef) -> None:
        metrics.FENCED.inc()
        refs = self._aborts.setdefault(worker, [])
        if ref not in refs:
            refs.append(ref)

    def since(self, worker: str, item: SinceItem) -> None:
        """Collect a question for missing tokens. A later one for the same request replaces it."""
        self._sinces.setdefault(worker, {})[item.id] = item

    def answer(self, worker: str, verdict: RunVerdict) -> None:
        self._answers.setdefault(worker, []).append(verdict)

    def poisoned(self, record: JobRecord, crashes: Sequence[Crash]) -> None:
        request = self._requests.get(record.id)
        if request is None or not self._tasks.is_open:
            return
        self._requests.keep_payload(record.id)
        history = [HistoryEntry(crash.attempt, crash.worker, crash.group) for crash in crashes]
        log.error(
            "job.poisoned",
            **log_ids(request),
            crashes=len(crashes),
            history=[[h.attempt, h.worker, h.group] for h in history],
        )
        letter = DeadLetter(
            envelope=request.envelope(), reason="poison", attempt=record.attempt, history=history, at=self._wall()
        )
        self._tasks.spawn(store_dead_letter(self._messaging, self._subjects, letter, retry_s=self._retry_s))

    def reply(self, subject: str, reply: Record) -> None:
        """Send the messages collected so far, then `reply`, unless the question named no subject for it."""
        self.flush()
        if subject:
            self._messaging.send(subject, encode(reply))

    def flush(self) -> None:
        # Each is taken out before it is sent: one that cannot be sent must not come again with every later message.
        while self._answers:
            worker, answers = self._answers.popitem()
            self._send(worker, Answers(answers=answers))
        while self._aborts:
            worker, refs = self._aborts.popitem()
            self._send(worker, Abort(runs=refs))
        while self._sinces:
            worker, items = self._sinces.popitem()
            metrics.GAPS.labels("gap").inc(len(items))
            self._send(worker, Since(items=list(items.values())))

    def _send(self, worker: str, message: Record) -> None:
        try:
            self._messaging.send(self._subjects.control(worker), encode(message))
        except (SubjectError, PayloadTooLarge) as error:
            metrics.FAILED_MESSAGES.labels("verdict").inc()
            log.error("verdict.not_sent", worker=worker[:80], error=str(error))


class RequestOwner:
    """Watches the open requests, hears their readers, and ends requests from the ingress's side."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        judge: Judge,
        outbox: JudgeOutbox,
        requests: OpenRequests,
        members: Members,
        *,
        ingress: str,
        settings: IngressSettings,
    ) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._judge = judge
        self._outbox = outbox
        self._requests = requests
        self._members = members
        self._ingress = ingress
        self._settings = settings
        self._unsent: dict[str, list[str]] = {}  # pool → ids cancelled in this turn of the event loop

    # Called by the streams:

    def on_drained(self, request_id: str) -> None:
        self._judge.resume_reading(request_id)
        self._outbox.flush()

    def on_cancelled(self, request_id: str) -> None:
        self.end(request_id, JobFault("cancelled", "the request was cancelled"), cause="client")

    def on_ended(self, request_id: str, fault: JobFault | None) -> None:
        self._requests.end(request_id, fault)

    # Ends:

    def end(self, request_id: str, fault: JobFault, *, cause: str) -> None:
        """End a request at this ingress and broadcast that to its pool. A request that has ended is left alone."""
        record = self._judge.close(request_id, fault)
        if record is None:
            return
        metrics.CANCELLED.labels(cause).inc()
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._broadcast)
        self._unsent.setdefault(record.pool, []).append(request_id)

    def _broadcast(self) -> None:
        for pool, ids in self._unsent.items():
            self._messaging.send(self._subjects.cancel(pool), encode(Cancel(ids=ids)))
        self._unsent.clear()

    def withdraw(self, name: str, tenant: str) -> int:
        """End the tenant's requests that have this id or name at this ingress. Returns their number."""
        found = self._requests.find(name, tenant)
        for request in found:
            log.info("job.withdrawn", **log_ids(request))
            self.end(request.id, JobFault("request_cancelled", "the request was cancelled by a call"), cause="call")
        return len(found)

    async def cancel(self, name: str, tenant: str, *, timeout_s: float) -> bool:
        """End the tenant's requests with this id or name here or, if there are none, at the other ingresses.

        Returns False if no ingress had such a request. Raises BrokerUnavailable if some ingress could not be asked and no other
        one had such a request.
        """
        if self.withdraw(name, tenant):
            return True
        others = [ingress for ingress in self._members.ingresses() if ingress != self._ingress]
        question = encode(CancelJob(name=name, tenant=tenant))
        answers = await asyncio.gather(*(self._ask(ingress, question, timeout_s) for ingress in others))
        if any(answers):
            return True
        if None in answers or not self._messaging.connected:
            raise BrokerUnavailable("not every frontend could be asked whether it has this request; try again shortly")
        return False

    async def _ask(self, ingress: str, question: bytes, timeout_s: float) -> bool | None:
        subject = self._subjects.judge(ingress)
        try:
            return decode(Done, await self._messaging.request(subject, question, timeout_s=timeout_s)).ok
        except NoResponder:
            return False  # its process is gone, and its requests with it
        except (JetStreamError, WireError):
            return None

    # The watch:

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = loop.time()
            self.end_overdue(now_s)
            self._ask_pools(self._judge.silent(now_s, self._settings.timing.silence_s), cause="silence")
            metrics.OPEN.set(len(self._judge))

    async def on_reconnect(self) -> None:
        self._ask_pools(list(self._judge), cause="reconnect")

    def end_overdue(self, now_s: float) -> None:
        for request in self._requests:
            paused_s = request.stream.paused_since_s
            if now_s >= request.deadline_s:
                fault = JobFault("deadline_exceeded", self._missed(request), retriable=True)
                self.end(request.id, fault, cause="deadline")
            elif paused_s is not None and now_s - paused_s > self._settings.slow_client_s:
                self.end(request.id, JobFault("slow_client", "the stream was not read in time"), cause="slow_client")

    def _missed(self, request: OpenRequest) -> str:
        envelope = request.envelope()
        after_s = envelope.deadline - envelope.created
        record = self._judge.get(request.id)
        if record is None or (record.run is None and not record.held):
            return never_started(after_s)
        return unfinished(after_s, sum(len(ids) for ids in record.emitted))

    def _ask_pools(self, records: list[JobRecord], *, cause: str) -> None:
        """Ask all workers of each pool: a stream may be silent because another worker than the one known here has it."""
        by_pool: dict[str, list[SinceItem]] = {}
        for record in records:
            by_pool.setdefault(record.pool, []).append(record.offsets())
        for pool, items in by_pool.items():
            metrics.GAPS.labels(cause).inc(len(items))
            self._messaging.send(self._subjects.find(pool), encode(Since(items=items)))
