"""Timelines of an ingress's requests, open ones and the last that ended, for `headrace trace`, `explain` and the request log.

They cost no message: job events reach every ingress, and the judge knows the end. An event of another ingress's request costs
one look-up here, one of an own request an entry in a list. Nothing is stored: after a restart of the ingress only the records
of placements are left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
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

ENDED = 4096  # stories of ended requests that are kept: some MB
LATE = 1024  # of them those whose events are still noted: workers send theirs in groups, the last ones after the end
MOST_TEXT = 2000  # characters of an error


class _Heard:
    __slots__ = ("events", "lost", "submitted_s")

    def __init__(self, submitted_s: float) -> None:
        self.submitted_s = submitted_s
        self.events: list[StoryEvent] = []
        self.lost = 0


class _Open(NamedTuple):
    job: Job
    record: JobRecord
    submitted: float
    heard: _Heard


class StoryBook:
    """The timelines of one ingress."""

    def __init__(self, ingress: str, *, ended: int = ENDED) -> None:
        """Keep the last `ended` requests that have ended. Call from a running event loop, whose time counts."""
        self._ingress = ingress
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, _Open] = {}
        self._heard: dict[str, _Heard] = {}
        self._late: deque[str] = deque()
        self._ended: deque[Story] = deque(maxlen=ended)

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, job: Job, record: JobRecord, submitted: float) -> None:
        heard = self._heard[job.id] = _Heard(self._loop.time())
        self._open[job.id] = _Open(job, record, submitted, heard)

    def drop(self, request_id: str) -> None:
        if self._open.pop(request_id, None) is not None:
            del self._heard[request_id]

    def on_event(self, event: JobEvent) -> bool:
        """Note an event of a request of this ingress. Returns False if it is none: it is open nowhere here."""
        heard = self._heard.get(event.id)
        if heard is None:
            return False
        if len(heard.events) >= MOST_EVENTS:
            heard.lost += 1
            return True
        heard.events.append(
            StoryEvent(
                self._loop.time() - heard.submitted_s,
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
        )
        return True

    def end(self, request_id: str, fault: JobFault | None) -> Story | None:
        """End the timeline of a request and return it, once. `fault`: the error that ended it, or None."""
        story = self._open.pop(request_id, None)
        if story is None:
            return None
        told = self._told(story, self._loop.time() - story.heard.submitted_s, fault)
        self._ended.append(told)
        self._late.append(request_id)
        if len(self._late) > LATE and (oldest := self._late.popleft()) not in self._open:
            self._heard.pop(oldest, None)
        return told

    def tell(self, name: str) -> list[Story]:
        """Return the last timelines of requests with this id or client's name, oldest first. Scans all of them."""
        still = [story for story in self._open.values() if name in (story.job.id, story.job.name)]
        ended = [story for story in self._ended if name in (story.id, story.name)]
        return [*ended, *(self._told(story, None, None) for story in still)][-MOST_STORIES:]

    def _told(self, story: _Open, ended_s: float | None, fault: JobFault | None) -> Story:
        job, record = story.job, story.record
        return Story(
            id=job.id,
            ingress=self._ingress,
            pool=job.card.pool,
            model=job.card.model,
            tenant=job.tenant,
            request_class=job.request_class,
            submitted=story.submitted,
            prompt_tokens=job.prompt_tokens,
            max_tokens=job.max_tokens,
            deadline_s=job.deadline_s,
            choices=job.choices,
            adapter=job.adapter,
            name=job.name,
            events=story.heard.events if ended_s is not None else list(story.heard.events),  # those of an ended one still grow
            lost_events=story.heard.lost,
            answer_tokens=sum(map(len, record.emitted)),
            ended_s=ended_s,
            finish=_reasons(record),
            fault=fault.code if fault is not None else "",
            message=fault.message[:MOST_TEXT] if fault is not None else "",
        )


def _reasons(record: JobRecord) -> list[str]:
    if record.choices == 1:
        fin = record.finished[0]
        return [fin.reason] if fin is not None and fin.fault is None else []
    ends: Iterable[str] = (fin.reason for fin in record.finished if fin is not None and fin.fault is None)
    return list(dict.fromkeys(ends))[:64]


class Journey:
    """Collects what an ingress hears of one request anyway. Times are those of its event loop."""

    __slots__ = ("_book", "_over", "_record", "_runs", "_submitted_s", "queue_s", "story")

    def __init__(self, record: JobRecord, submitted_s: float, book: StoryBook | None = None) -> None:
        self._book = book
        self._record = record
        self._submitted_s = submitted_s
        self._over = False
        self.story: Story | None = None  # once it has ended; events that come late are added to it
        self._runs: list[tuple[int, str]] = []  # attempt, worker
        self.queue_s: float | None = None  # from its submission to its first start in a worker; None = that was not heard

    def started(self, attempt: int, worker: str, now_s: float) -> None:
        if self.queue_s is None:
            self.queue_s = now_s - self._submitted_s
        self._runs.append((attempt, worker))

    def ended(self, fault: JobFault | None) -> None:
        """Note the end: a fault or, None, an answer. The first one counts."""
        if self._over:
            return
        self._over = True
        metrics.count_end(None if fault is None else fault.code)
        if self._book is not None:
            self.story = self._book.end(self._record.id, fault)

    @property
    def workers(self) -> list[str]:
        """The workers that had it, in the order of attempts, each once."""
        record = self._record
        if len(self._runs) == 1 and self._runs[0][1] == record.worker:
            return [record.worker]
        runs = [*self._runs, (record.attempt, record.worker)] if record.worker is not None else self._runs
        return list(dict.fromkeys(worker for _, worker in sorted(runs)))

    @property
    def attempts(self) -> int:
        """The number of known attempts; 0 = none."""
        if len(self._runs) == 1 == self._record.attempt:
            return 1
        workers = len(self.workers)
        return max(len(self._runs), workers, self._record.attempt % GENERATION if workers else 0)

    @property
    def finish_reasons(self) -> list[str]:
        return list(dict.fromkeys(fin.reason for fin in self._record.finished if fin is not None and fin.fault is None))


log = structlog.get_logger()

LIMIT = 4096  # requests followed at once; beyond it the oldest one is forgotten


class Decisions:
    def __init__(self, messaging: Messaging, subjects: Subjects) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._placed: dict[str, asyncio.Future[JobEvent]] = {}
        self._loop = asyncio.get_running_loop()

    def expect(self, request_id: str) -> None:
        """Follow a request. It must be called before the request is submitted."""
        self._placed[request_id] = self._loop.create_future()
        if len(self._placed) > LIMIT:
            self.forget(next(iter(self._placed)))

    def forget(self, request_id: str) -> None:
        if (placed := self._placed.pop(request_id, None)) is not None:
            placed.cancel()

    def on_event(self, event: JobEvent) -> None:
        if event.kind != "placed" or not self._placed:
            return
        placed = self._placed.get(event.id)
        if placed is not None and not placed.done():
            placed.set_result(event)

    async def explain(self, request_id: str, *, timeout_s: float) -> Explanation:
        """Return the decision within `timeout_s`; one that cannot be had is `known=False`, with the reason."""
        placed = self._placed.get(request_id)
        if placed is None:
            return _unknown(request_id, "it was not asked for in time")
        event: JobEvent | None = None
        try:
            async with asyncio.timeout(timeout_s):
                event = await asyncio.shield(placed)
                if not event.by:
                    return Explanation(
                        id=request_id,
                        known=False,
                        state="placed",
                        worker=event.worker,
                        reason="no router was running: the worker took it itself",
                    )
                answer = await self._messaging.request(
                    self._subjects.control(event.by), encode(Explain(id=request_id)), timeout_s=timeout_s
                )
                return decode(Explanation, answer)
        except TimeoutError:
            why = "nobody said in time who placed it" if event is None else f"the router does not answer: {event.by} is silent"
            return _unknown(request_id, why)
        except WireError as error:
            metrics.MALFORMED.labels("explanation").inc()
            log.error("explanation.malformed", request_id=request_id, error=str(error))
            return _unknown(request_id, "the router's answer could not be read")
        except JetStreamError as error:
            return _unknown(request_id, f"the router does not answer: {error}")
        finally:
            self.forget(request_id)


def _unknown(request_id: str, why: str) -> Explanation:
    return Explanation(id=request_id, known=False, reason=why)
