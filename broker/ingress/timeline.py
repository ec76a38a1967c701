"""The timeline of a request: one record of what an ingress hears of it, from its submission to its end.

`headrace trace`, the console, spans, the log line and the audit record are renderings of it. It costs no message: job events
reach every ingress, and the judge knows the end. An event of another ingress's request costs one look-up here, an event of an
own request an entry in a list. Nothing is stored: after a restart of the ingress only the records of placements are left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, encode
from headrace.broker.errors import WireError
from headrace.broker.jobs import Job
from headrace.broker.messages.control import MOST_EVENTS, MOST_STORIES, Explain, Explanation, Story, StoryEvent
from headrace.broker.messages.events import JobEvent
from headrace.broker.messages.frames import JobFault
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.resume import GENERATION
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()

ENDED = 4096  # ended requests that are kept, without their prompts and tokens: some MB
LATE = 1024  # of them those whose events are still noted: workers send theirs in groups, the last ones after the end
MOST_TEXT = 2000  # characters of an error


class Course(NamedTuple):
    """A request in short, for its log line. `queue_s` is None and `workers` empty where no start was heard of."""

    queue_s: float | None
    workers: list[str]  # in the order of their attempts, each once
    attempts: int  # the known ones
    finish_reasons: list[str]  # each once


class RequestTimeline:
    """`story` is None until the request has ended; events that come late are added to it all the same."""

    __slots__ = (
        "_attempt",
        "_events",
        "_first_start_s",
        "_lost",
        "_open",
        "_placed",
        "_room",
        "_starts",
        "_submitted_s",
        "_wall",
        "_worker",
        "story",
    )

    def __init__(self, job: Job, record: JobRecord, submitted_s: float, wall: float) -> None:
        """`submitted_s` is loop time, `wall` the same moment as Unix time."""
        self.story: Story | None = None
        self._open: tuple[Job, JobRecord] | None = (job, record)  # let go at the end: both are large
        self._submitted_s = submitted_s
        self._wall = wall
        self._attempt = 1
        self._worker: str | None = None
        self._first_start_s: float | None = None
        self._events: list[StoryEvent] = []
        self._starts: list[tuple[int, str]] = []  # attempts and their workers, of the events
        self._room = MOST_EVENTS
        self._lost = 0
        self._placed: asyncio.Future[StoryEvent] | None = None  # while a caller waits for it

    def add(self, event: JobEvent, now_s: float) -> None:
        if not self._room:
            self._lost += 1
            return
        self._room -= 1
        heard = StoryEvent(
            now_s - self._submitted_s,
            event.kind,
            event.attempt,
            event.worker,
            event.tokens,
            event.uncached,
            event.by,
            event.prefill,
            event.rank,
            event.fetch_ms,
        )
        self._events.append(heard)
        if event.kind == "started":
            self._starts.append((event.attempt, event.worker))
            if self._first_start_s is None:
                self._first_start_s = heard.after_s
        elif event.kind == "placed" and self._placed is not None and not self._placed.done():
            self._placed.set_result(heard)

    def end(self, fault: JobFault | None, now_s: float, ingress: str) -> Story | None:
        """End it with a fault or, None, an answer. Returns its story, None if it had ended before."""
        if self._open is None:
            return None
        job, record = self._open
        self._attempt, self._worker = record.attempt, record.worker
        self.story = self._told(job, record, ingress, now_s - self._submitted_s, fault)
        self._open = None
        return self.story

    def so_far(self, name: str, ingress: str) -> Story | None:
        """Return the story of an open request with this id or client's name, None if it is another or has ended."""
        if self._open is None:
            return None
        job, record = self._open
        return self._told(job, record, ingress, None, None) if name in (job.id, job.name) else None

    def _told(self, job: Job, record: JobRecord, ingress: str, ended_s: float | None, fault: JobFault | None) -> Story:
        return Story(
            id=job.id,
            ingress=ingress,
            pool=job.card.pool,
            model=job.card.model,
            tenant=job.tenant,
            request_class=job.request_class,
            submitted=self._wall,
            prompt_tokens=job.prompt_tokens,
            max_tokens=job.max_tokens,
            deadline_s=job.deadline_s,
            choices=job.choices,
            adapter=job.adapter,
            name=job.name,
            events=list(self._events) if ended_s is None else self._events,  # those of an ended one still grow
            lost_events=self._lost,
            answer_tokens=sum(map(len, record.emitted)),
            ended_s=ended_s,
            finish=_reasons(record),
            fault=fault.code if fault is not None else "",
            message=fault.message[:MOST_TEXT] if fault is not None else "",
        )

    def course(self) -> Course:
        if self._open is None:
            attempt, worker, reasons = self._attempt, self._worker, self.story.finish if self.story is not None else []
        else:
            record = self._open[1]
            attempt, worker, reasons = record.attempt, record.worker, _reasons(record)
        starts = self._starts
        if worker is not None and starts == [(1, worker)] and attempt == 1:  # nearly always
            return Course(self._first_start_s, [worker], 1, reasons)
        runs = sorted(starts if worker is None else [*starts, (attempt, worker)])  # the start of the last run may be unheard
        workers = list(dict.fromkeys([name for _, name in runs]))
        attempts = max(len(starts), len(workers), attempt % GENERATION if workers else 0)
        if len(starts) == 1 == attempt:
            attempts = 1
        return Course(self._first_start_s, workers, attempts, reasons)

    async def placed(self) -> StoryEvent:
        """Wait until the request has been placed."""
        for event in self._events:
            if event.kind == "placed":
                return event
        if self._placed is None:
            self._placed = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._placed)


def _reasons(record: JobRecord) -> list[str]:
    ends: list[str] = [fin.reason for fin in record.finished if fin is not None and fin.fault is None]
    return ends if len(ends) < 2 else list(dict.fromkeys(ends))


class Timelines:
    """The timelines of one ingress: of its open requests, and of the last that ended."""

    def __init__(self, ingress: str, *, ended: int = ENDED) -> None:
        self._ingress = ingress
        self._noted: dict[str, RequestTimeline] = {}  # open, or ended lately
        self.get = self._noted.get
        """Return the timeline of a request of this ingress that is open, or ended lately."""
        self._late: deque[str] = deque()
        self._ended: deque[Story] = deque(maxlen=ended)

    def begin(self, job: Job, record: JobRecord, submitted_s: float, wall: float) -> RequestTimeline:
        timeline = self._noted[job.id] = RequestTimeline(job, record, submitted_s, wall)
        return timeline

    def drop(self, request_id: str) -> None:
        self._noted.pop(request_id, None)

    def end(self, request_id: str, fault: JobFault | None, now_s: float) -> None:
        """End a timeline, and count how. The first end counts."""
        timeline = self._noted.get(request_id)
        story = timeline.end(fault, now_s, self._ingress) if timeline is not None else None
        if story is None:
            return
        metrics.count_end(None if fault is None else fault.code)
        self._ended.append(story)
        self._late.append(request_id)
        if (
            len(self._late) > LATE
            and (oldest := self._noted.get(self._late.popleft())) is not None
            and oldest.story is not None
        ):
            del self._noted[oldest.story.id]

    def tell(self, name: str) -> list[Story]:
        """Return the last stories of requests with this id or client's name, oldest first. Scans all of them."""
        found = [story for story in self._ended if name in (story.id, story.name)]
        found += [story for timeline in self._noted.values() if (story := timeline.so_far(name, self._ingress)) is not None]
        return found[-MOST_STORIES:]


async def explain(
    timeline: RequestTimeline | None, request_id: str, messaging: Messaging, subjects: Subjects, *, timeout_s: float
) -> Explanation:
    """Return the router's decision within `timeout_s`; one that cannot be had is `known=False`, with the reason."""
    if timeline is None:
        return _unknown(request_id, "it was not asked for in time")
    event: StoryEvent | None = None
    try:
        async with asyncio.timeout(timeout_s):
            event = await timeline.placed()
            if not event.by:
                return Explanation(
                    id=request_id,
                    known=False,
                    state="placed",
                    worker=event.worker,
                    reason="no router was running: the worker took it itself",
                )
            question = encode(Explain(id=request_id))
            return decode(Explanation, await messaging.request(subjects.control(event.by), question, timeout_s=timeout_s))
    except TimeoutError:
        why = "nobody said in time who placed it" if event is None else f"the router does not answer: {event.by} is silent"
        return _unknown(request_id, why)
    except WireError as error:
        metrics.MALFORMED.labels("explanation").inc()
        log.error("explanation.malformed", request_id=request_id, error=str(error))
        return _unknown(request_id, "the router's answer could not be read")
    except JetStreamError as error:
        return _unknown(request_id, f"the router does not answer: {error}")


def _unknown(request_id: str, why: str) -> Explanation:
    return Explanation(id=request_id, known=False, reason=why)
