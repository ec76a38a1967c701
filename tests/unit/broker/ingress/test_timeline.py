"""Stories of requests: what is noted, what is forgotten, and how much is kept."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.broker import metrics
from headrace.broker.ingress.timeline import LATE, Journey, StoryBook
from headrace.broker.jobs import Job
from headrace.broker.messages.control import MOST_EVENTS, MOST_STORIES
from headrace.broker.messages.events import JobEvent
from headrace.broker.messages.frames import Finish, JobFault, Row
from headrace.broker.models.cards import ModelCard
from headrace.broker.protocol.job_record import NO_READER, JobRecord
from headrace.broker.protocol.resume import GENERATION

CARD = ModelCard(model="m", pool="m-1", context_length=64, block_size=16, vocab_size=9, eos_token_ids=[1])


def begun(book: StoryBook, request_id: str = "r", **job: Any) -> JobRecord:
    record = JobRecord(request_id, CARD.pool, 1, NO_READER, 0.0)
    book.begin(Job(id=request_id, card=CARD, prompt_tokens=20, **job), record, 1_700_000_000.0)
    return record


async def test_a_story_has_what_was_heard_and_how_it_ended() -> None:
    book = StoryBook("i-1")
    record = begun(book, name="mine", tenant="t", max_tokens=5)
    book.on_event(JobEvent("placed", "r", 1, "w-1", tokens=20, uncached=4, by="router-1"))
    book.on_event(JobEvent("started", "r", 1, "w-1"))
    book.on_event(JobEvent("started", "of-another-ingress", 1, "w-1"))
    (still,) = book.tell("mine")
    assert (still.ended_s, still.fault, [event.kind for event in still.events]) == (None, "", ["placed", "started"])
    book.on_event(JobEvent("prefilled", "r", 1, "w-1", uncached=3))
    assert len(still.events) == 2, "what was told does not change"
    record.emitted = [[7, 8, 9]]
    record.finished = [Finish(reason="stop")]
    book.end("r", None)
    assert not len(book)
    (story,) = book.tell("r")
    assert story.ended_s is not None
    assert (story.answer_tokens, story.finish, story.tenant, story.ingress) == (3, ["stop"], "t", "i-1")
    assert next((event.kind, event.uncached, event.by) for event in story.events) == ("placed", 4, "router-1")


async def test_an_event_is_known_to_be_one_of_this_ingress_also_when_nothing_more_is_kept() -> None:
    book = StoryBook("i-1")
    begun(book)
    heard = [book.on_event(JobEvent("started", "r", attempt, "w-1")) for attempt in range(1, MOST_EVENTS + 3)]
    assert all(heard)
    assert not book.on_event(JobEvent("started", "of-another-ingress", 1, "w-1"))


async def test_an_error_is_kept_and_the_first_end_counts() -> None:
    book = StoryBook("i-1")
    begun(book)
    book.end("r", JobFault("deadline_exceeded", "x" * 5000))
    book.end("r", None)
    (story,) = book.tell("r")
    assert story.fault == "deadline_exceeded"
    assert len(story.message) == 2000


async def test_a_request_that_was_never_stored_has_no_story() -> None:
    book = StoryBook("i-1")
    begun(book)
    book.drop("r")
    book.end("r", None)
    assert not book.tell("r")


async def test_only_the_last_ones_are_kept_and_told() -> None:
    book = StoryBook("i-1", ended=20)
    for number in range(40):
        begun(book, f"r{number}", name="same")
        book.end(f"r{number}", None)
    assert not book.tell("r19")
    assert book.tell("r20")
    told = book.tell("same")
    assert [story.id for story in told] == [f"r{number}" for number in range(40 - MOST_STORIES, 40)]


async def test_a_request_that_moves_for_ever_fills_no_memory() -> None:
    book = StoryBook("i-1")
    begun(book)
    for attempt in range(1, MOST_EVENTS + 11):
        book.on_event(JobEvent("moved", "r", attempt, "w"))
    (story,) = book.tell("r")
    assert (len(story.events), story.lost_events) == (MOST_EVENTS, 10)


async def test_what_is_heard_soon_after_the_end_belongs_to_it_and_no_more_is_kept_for_it() -> None:
    book = StoryBook("i-1")
    begun(book)
    book.end("r", None)
    book.on_event(JobEvent("prefilled", "r", 1, "w-1"))
    assert [event.kind for event in book.tell("r")[0].events] == ["prefilled"]
    for number in range(LATE):
        begun(book, f"r{number}")
        book.end(f"r{number}", None)
    book.on_event(JobEvent("settled", "r", 1, "w-1"))
    assert [event.kind for event in book.tell("r")[0].events] == ["prefilled"]


@pytest.mark.parametrize("name", ["", "unknown"])
async def test_a_name_that_no_request_has_finds_nothing(name: str) -> None:
    book = StoryBook("i-1")
    begun(book, name="mine")
    assert not book.tell(name)


class Reader:
    def take(self, row: Row) -> bool:
        return True

    def end(self, fault: JobFault | None) -> None:
        pass


def record(choices: int = 1) -> JobRecord:
    return JobRecord("r", "p", choices, Reader(), 5.0)


def test_one_that_never_started_has_no_worker_no_wait_and_no_attempt() -> None:
    journey = Journey(record(), 5.0)
    assert (journey.workers, journey.queue_s, journey.attempts, journey.finish_reasons) == ([], None, 0, [])


def test_the_wait_ends_with_the_first_start_and_workers_come_in_order_of_attempts() -> None:
    journey = Journey(record(), 5.0)
    journey.started(1, "z", 5.5)
    journey.started(2, "a", 9.0)
    assert (journey.queue_s, journey.workers, journey.attempts) == (0.5, ["z", "a"], 2)


def test_the_worker_of_the_current_run_counts_when_its_start_was_not_heard() -> None:
    job = record()
    journey = Journey(job, 5.0)
    journey.started(1, "z", 5.5)
    job.attempt, job.worker = 2, "a"
    assert (journey.workers, journey.attempts) == (["z", "a"], 2)


def test_a_worker_that_had_it_twice_is_named_once() -> None:
    journey = Journey(record(), 5.0)
    journey.started(1, "z", 5.5)
    journey.started(2, "z", 6.0)
    assert (journey.workers, journey.attempts) == (["z"], 2)


def test_the_high_number_of_a_resubmitted_attempt_does_not_count_as_so_many() -> None:
    job = record()
    journey = Journey(job, 5.0)
    journey.started(1, "z", 5.5)
    job.attempt, job.worker = GENERATION, "a"
    assert (journey.workers, journey.attempts) == (["z", "a"], 2)


def test_each_reason_to_finish_is_told_once_and_a_fault_is_none() -> None:
    job = record(3)
    journey = Journey(job, 5.0)
    job.finished = [Finish(reason="stop"), Finish(reason="length"), Finish(reason="error", fault=JobFault("x", "y"))]
    assert journey.finish_reasons == ["stop", "length"]


def ends(outcome: str) -> float:
    value = metrics.ENDED.labels(outcome)._value.get()
    assert isinstance(value, float)
    return value


def test_each_request_is_counted_once_by_how_it_ended() -> None:
    answered, failed = ends("answered"), ends("engine_error")
    journey = Journey(record(), 0.0)
    journey.ended(None)
    journey.ended(JobFault("engine_error", "too late"))
    Journey(record(), 0.0).ended(JobFault("engine_error", "broken"))
    assert (ends("answered") - answered, ends("engine_error") - failed) == (1, 1)
