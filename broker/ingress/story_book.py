"""Keeps the stories of an ingress's open requests and of the last ones that ended, for `headrace trace`.

Everything in them is heard anyway: job events reach every ingress, and the judge knows the end.  An event of another ingress's
request costs one look-up here, one of an own request an entry in a list.  Nothing is stored: after a restart of the ingress the
records of placements are what is left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from headrace.broker.jobs import Job
from headrace.broker.messages import JobEvent, JobFault
from headrace.broker.messages.stories import MOST_EVENTS, MOST_STORIES, Story, StoryEvent
from headrace.broker.protocol.job_record import JobRecord

ENDED = 4096  # stories of ended requests that are kept: some MB
LATE = 1024  # of them those whose events are still noted: workers send theirs in groups, the last ones after the end
MOST_TEXT = 2000  # characters of an error


class _Heard:
    """The events of a request."""

    __slots__ = ("events", "lost", "submitted_s")

    def __init__(self, submitted_s: float) -> None:
        self.submitted_s = submitted_s
        self.events: list[StoryEvent] = []
        self.lost = 0


class _Open(NamedTuple):
    """The story of an open request."""

    job: Job
    record: JobRecord
    submitted: float
    heard: _Heard


class StoryBook:
    """The stories of one ingress."""

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
        """Begin the story of a request that is about to be stored. `submitted` is Unix time."""
        heard = self._heard[job.id] = _Heard(self._loop.time())
        self._open[job.id] = _Open(job, record, submitted, heard)

    def drop(self, request_id: str) -> None:
        """Forget a request that could not be stored: it was refused, and has no story."""
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
        """End the story of a request, with the fault that ended it or, None, with an answer, and return it. Once only."""
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
        """Return the last stories of requests with this id or client's name, oldest first. Reads all of them."""
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
