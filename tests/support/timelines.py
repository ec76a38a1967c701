"""Timelines of requests as an ingress has heard of them."""

from __future__ import annotations

from typing import Any

from headrace.broker.ingress.timeline import RequestTimeline, Timelines
from headrace.broker.jobs import Job
from headrace.broker.messages.events import JobEvent
from headrace.broker.models.cards import ModelCard
from headrace.broker.protocol.job_record import NO_READER, JobRecord

CARD = ModelCard(model="m", pool="m-1", context_length=64, block_size=16, vocab_size=9, eos_token_ids=[1])
SUBMITTED_S = 5.0
WALL = 1_700_000_000.0


def begun(book: Timelines, request_id: str = "r", **job: Any) -> tuple[JobRecord, RequestTimeline]:
    made = Job(id=request_id, card=CARD, prompt_tokens=20, **job)
    record = JobRecord(request_id, CARD.pool, made.choices, NO_READER, SUBMITTED_S)
    return record, book.begin(made, record, SUBMITTED_S, WALL)


def started(timeline: RequestTimeline, attempt: int, worker: str, after_s: float) -> None:
    timeline.add(JobEvent("started", "r", attempt, worker), SUBMITTED_S + after_s)
