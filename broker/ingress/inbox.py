"""Messages that reach an ingress: token frames, control requests of workers and ingresses, and events of pools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, decode_ingress_control
from headrace.broker.dead_letters import note_failure
from headrace.broker.errors import WireError
from headrace.broker.ingress.requests import JudgeOutbox, RequestOwner
from headrace.broker.ingress.timeline import Timelines
from headrace.broker.membership.members import Members, drained_key
from headrace.broker.messages.control import (
    CancelJob,
    Carrying,
    Check,
    Claim,
    ClaimReply,
    Done,
    HistoryEntry,
    IngressControl,
    Refuse,
    RunRef,
    Stories,
    Suspicion,
    SuspicionQuery,
    TellStories,
)
from headrace.broker.messages.events import JobEvents
from headrace.broker.messages.frames import Frame, Row
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.judge import Judge
from headrace.broker.protocol.quarantine import base_worker
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Message, Messaging
from headrace.jetstream.subjects import Subjects, WorkerSubject, said_by
from headrace.jetstream.tasks import TaskScope

log = structlog.get_logger()


Decide = Callable[[Collection[str]], None]


class ClaimDecider:
    """Answers claims and suspicion queries: at once, or when the leases of workers that may have crashed have been read."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        judge: Judge,
        outbox: JudgeOutbox,
        members: Members,
        tasks: TaskScope,
    ) -> None:
        self._subjects = subjects
        self._judge = judge
        self._outbox = outbox
        self._members = members
        self._tasks = tasks
        self._leases = messaging.bucket(subjects.bucket("members"))
        self._state = messaging.bucket(subjects.bucket("state"))
        self._loop = asyncio.get_running_loop()

    def on_claim(self, claim: Claim, reply: str) -> None:
        """Answer `claim` on the subject `reply`, now or from a task. A worker repeats a claim that gets no answer."""
        record = self._judge.get(claim.id)
        if record is None:
            self._outbox.reply(reply, ClaimReply(verdict="unknown"))
        else:
            self._when_read(record, claim.history, lambda accounted: self._decide(claim, reply, accounted))

    def on_suspicion(self, query: SuspicionQuery, reply: str) -> None:
        """Answer `query` on the subject `reply`, now or from a task."""
        record = self._judge.get(query.id)
        if record is None:
            self._outbox.reply(reply, Suspicion())
        else:
            self._when_read(record, query.history, lambda accounted: self._tell(query, reply, accounted))

    def _when_read(self, record: JobRecord, history: Iterable[HistoryEntry], decide: Decide) -> None:
        """Read the leases of those that may have crashed, then call `decide` with those of them that have not."""
        entries = (entry for entry in (*history, *record.history) if entry.attempt >= record.cleared)
        suspects = sorted({entry.worker for entry in entries if base_worker(entry.worker) == entry.worker})
        if not suspects:
            decide(frozenset())
        elif self._tasks.is_open:
            self._tasks.spawn_guarded(self._read(record, suspects, decide), lambda error: note_failure("claim", error))

    async def _read(self, record: JobRecord, suspects: list[str], decide: Decide) -> None:
        try:
            found = await asyncio.gather(*(self._accounted(record.pool, worker) for worker in suspects))
        except JetStreamError as error:  # no answer: the worker or router asks again
            log.warning("claim.undecided", request_id=record.id, error=str(error))
            return
        decide(frozenset(worker for worker, accounted in zip(suspects, found, strict=True) if accounted))

    async def _accounted(self, pool: str, worker: str) -> bool:
        """Read from the server whether this process is live under the same identity or has announced a drain."""
        if await self._leases.get(self._subjects.worker_key(pool, worker)) is not None:
            return True
        return await self._state.get(drained_key(worker)) is not None

    def _decide(self, claim: Claim, reply: str, accounted: Collection[str]) -> None:
        record = self._judge.get(claim.id)
        pool = record.pool if record is not None else ""
        verdict = self._judge.on_claim(
            claim,
            self._loop.time(),
            accounted=accounted.__contains__,
            alive=lambda worker: self._members.worker_live(pool, worker),
        )
        self._outbox.reply(reply, verdict)

    def _tell(self, query: SuspicionQuery, reply: str, accounted: Collection[str]) -> None:
        self._outbox.reply(reply, self._judge.on_suspicion(query, accounted=accounted.__contains__))


# Compares what a message to an ingress says with the worker that its subject names, and which the server has checked.
#
# Where workers log in, they may publish only to subjects that have their pool and, with a login of their own, their id. So a
# frame or a claim counts only for requests of that pool and in the name of that worker.


def forged_frame(judge: Judge, sender: WorkerSubject, frame: Frame) -> str:
    """Return why a frame of this sender is dropped, or an empty string."""
    if frame.worker != sender.worker:
        return f"it is sent by {sender.worker} in the name of {frame.worker}"
    return _of_another_pool(judge, sender, frame.rows)


def forged_control(judge: Judge, sender: WorkerSubject, control: IngressControl) -> str:
    """Return why a question of this sender is not answered, or an empty string."""
    if isinstance(control, Claim | Check) and control.worker != sender.worker:
        return f"it is sent by {sender.worker} in the name of {control.worker}"
    if isinstance(control, Check):
        return _of_another_pool(judge, sender, control.runs)
    if isinstance(control, Claim | SuspicionQuery | Refuse):
        return _of_another_pool(judge, sender, (control,))
    return "a worker may not say that"


def _of_another_pool(
    judge: Judge, sender: WorkerSubject, named: Iterable[Row | RunRef | Claim | SuspicionQuery | Refuse]
) -> str:
    for one in named:
        record = judge.get(one.id)
        if record is not None and record.pool != sender.pool:
            return f"a worker of pool {sender.pool} speaks of a request of pool {record.pool}"
    return ""


class IngressInbox:
    def __init__(
        self,
        judge: Judge,
        outbox: JudgeOutbox,
        owner: RequestOwner,
        claims: ClaimDecider,
        timelines: Timelines,
        carries: Callable[[str, str], bool],
    ) -> None:
        """`carries(job, nonce)`: a job runner here has that delivery of a stored job."""
        self._judge = judge
        self._outbox = outbox
        self._owner = owner
        self._claims = claims
        self._timelines = timelines
        self._carries = carries
        self._loop = asyncio.get_running_loop()

    def on_named_frame(self, message: Message) -> None:
        """Do the same as `on_frame` for a frame whose subject names its sender. In the name of others it is dropped."""
        self.on_frame(message, said_by(message.subject))

    def on_named_control(self, message: Message) -> None:
        """Do the same as `on_control` for a message whose subject names its sender. In the name of others it is dropped."""
        self.on_control(message, said_by(message.subject))

    def on_frame(self, message: Message, sender: WorkerSubject | None = None) -> None:
        """Give the rows of a token frame to the judge. A frame that cannot be decoded is logged and dropped."""
        try:
            frame = decode(Frame, message.data)
        except WireError as error:
            metrics.MALFORMED.labels("frame").inc()
            log.error("frame.malformed", error=str(error))
            return
        if sender is not None and (why := forged_frame(self._judge, sender, frame)):
            self._refuse("frame", sender, why)
            return
        self._judge.on_frame(frame, self._loop.time())
        self._outbox.flush()

    def on_events(self, message: Message) -> None:
        """Give the events of a pool to the timelines and the judge."""
        try:
            events = decode(JobEvents, message.data).events
        except WireError as error:
            metrics.MALFORMED.labels("event").inc()
            log.error("event.malformed", error=str(error))
            return
        now_s = self._loop.time()
        for event in events:
            timeline = self._timelines.get(event.id)
            if timeline is None:
                continue  # it is about a request of another ingress, as most are where there are many
            timeline.add(event, now_s)
            if event.kind == "started":
                self._judge.on_event(event)

    def _refuse(self, kind: str, sender: WorkerSubject, why: str) -> None:
        metrics.FORGED.labels(kind).inc()
        log.warning("message.forged", kind=kind, worker=sender.worker, pool=sender.pool, reason=why)

    def on_control(self, message: Message, sender: WorkerSubject | None = None) -> None:
        try:
            control = decode_ingress_control(message.data)
        except WireError as error:
            metrics.MALFORMED.labels("control").inc()
            log.error("control.malformed", error=str(error))
            return
        if sender is not None and (why := forged_control(self._judge, sender, control)):
            self._refuse("control", sender, why)
            return
        if isinstance(control, Claim):
            self._claims.on_claim(control, message.reply)
        elif isinstance(control, SuspicionQuery):
            self._claims.on_suspicion(control, message.reply)
        elif isinstance(control, Check):
            self._outbox.reply(message.reply, self._judge.on_check(control, self._loop.time()))
        elif isinstance(control, Carrying):
            self._outbox.reply(message.reply, Done(ok=self._carries(control.job, control.nonce)))
        elif isinstance(control, TellStories):
            self._outbox.reply(message.reply, Stories(stories=self._timelines.tell(control.name)))
        elif isinstance(control, CancelJob):
            self._outbox.reply(message.reply, Done(ok=self._owner.withdraw(control.name, control.tenant) > 0))
        else:
            self._outbox.reply(message.reply, self._judge.on_refuse(control))
