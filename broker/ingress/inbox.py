"""Reads the messages that reach an ingress: token frames, control requests of workers and ingresses, and events of pools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, decode_ingress_control
from headrace.broker.errors import WireError
from headrace.broker.ingress.cancellation import Canceller
from headrace.broker.ingress.claims import ClaimDecider
from headrace.broker.ingress.judge_outbox import JudgeOutbox
from headrace.broker.ingress.named_senders import forged_control, forged_frame
from headrace.broker.ingress.open_jobs import OpenJobs
from headrace.broker.ingress.placement_decisions import Decisions
from headrace.broker.ingress.story_book import StoryBook
from headrace.broker.messages import CancelJob, Carrying, Check, Claim, Done, Frame, JobEvents, SuspicionQuery
from headrace.broker.messages.stories import Stories, TellStories
from headrace.broker.protocol.judge import Judge
from headrace.jetstream.ports import Message
from headrace.jetstream.subjects import WorkerSubject, said_by

log = structlog.get_logger()


class IngressInbox:
    """Feeds the messages of an ingress to its judge, and sends the judge's replies."""

    def __init__(
        self,
        judge: Judge,
        open_jobs: OpenJobs,
        outbox: JudgeOutbox,
        claims: ClaimDecider,
        canceller: Canceller,
        decisions: Decisions,
        stories: StoryBook,
    ) -> None:
        self._judge = judge
        self._open = open_jobs
        self._outbox = outbox
        self._claims = claims
        self._canceller = canceller
        self._decisions = decisions
        self._stories = stories
        self.carrying: Callable[[str, str], bool] = lambda _job, _nonce: (
            False
        )  # set by the carrier of stored jobs, if there is one
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
        """Give the events of a pool to the judge and to the placement decisions that are waited for."""
        try:
            events = decode(JobEvents, message.data).events
        except WireError as error:
            metrics.MALFORMED.labels("event").inc()
            log.error("event.malformed", error=str(error))
            return
        for event in events:
            if not self._stories.on_event(event):
                continue  # it is about a request of another ingress, as most are where there are many
            kind = event.kind
            if kind == "placed":
                self._decisions.on_event(event)
            elif kind == "started":
                self._judge.on_event(event)
                if (job := self._open.get(event.id)) is not None and job.stream.journey is not None:
                    job.stream.journey.started(event.attempt, event.worker, self._loop.time())

    def _refuse(self, kind: str, sender: WorkerSubject, why: str) -> None:
        metrics.FORGED.labels(kind).inc()
        log.warning("message.forged", kind=kind, worker=sender.worker, pool=sender.pool, reason=why)

    def on_control(self, message: Message, sender: WorkerSubject | None = None) -> None:
        """Answer a claim, suspicion query, check, refusal or cancellation."""
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
            self._outbox.reply(message.reply, Done(ok=self.carrying(control.job, control.nonce)))
        elif isinstance(control, TellStories):
            self._outbox.reply(message.reply, Stories(stories=self._stories.tell(control.name)))
        elif isinstance(control, CancelJob):
            self._outbox.reply(message.reply, Done(ok=self._canceller.withdraw(control.name, control.tenant) > 0))
        else:
            self._outbox.reply(message.reply, self._judge.on_refuse(control))
