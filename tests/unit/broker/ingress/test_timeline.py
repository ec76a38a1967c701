"""Timelines of requests: what is noted, what is forgotten, and what trace, log line and explain say of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.broker import metrics
from headrace.broker.codec import encode
from headrace.broker.ingress.timeline import LATE, Course, RequestTimeline, Timelines, explain
from headrace.broker.messages.control import MOST_EVENTS, MOST_STORIES, Explanation
from headrace.broker.messages.events import JobEvent
from headrace.broker.messages.frames import Finish, JobFault
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.resume import GENERATION
from headrace.jetstream.errors import NoResponder, RequestTimeout
from headrace.jetstream.subjects import Subjects
from tests.support.timelines import SUBMITTED_S, begun, started


async def test_a_story_has_the_events_and_the_end() -> None:
    book = Timelines("i-1")
    record, timeline = begun(book, name="mine", tenant="t", max_tokens=5)
    timeline.add(JobEvent("placed", "r", 1, "w-1", tokens=20, uncached=4, by="router-1"), SUBMITTED_S + 1.0)
    started(timeline, 1, "w-1", 2.0)
    (still,) = book.tell("mine")
    assert (still.ended_s, still.fault, [event.kind for event in still.events]) == (None, "", ["placed", "started"])
    timeline.add(JobEvent("prefilled", "r", 1, "w-1", uncached=3), SUBMITTED_S + 3.0)
    assert len(still.events) == 2, "a story that was sent does not change"
    record.emitted = [[7, 8, 9]]
    record.finished = [Finish(reason="stop")]
    book.end("r", None, SUBMITTED_S + 4.0)
    (story,) = book.tell("r")
    assert story is timeline.story
    assert [event.after_s for event in story.events] == [1.0, 2.0, 3.0]
    assert (story.ended_s, story.answer_tokens, story.finish, story.tenant, story.ingress) == (4.0, 3, ["stop"], "t", "i-1")
    assert next((event.kind, event.uncached, event.by) for event in story.events) == ("placed", 4, "router-1")


def ends(outcome: str) -> float:
    value = metrics.ENDED.labels(outcome)._value.get()
    assert isinstance(value, float)
    return value


async def test_an_error_is_kept_and_the_first_end_counts_once() -> None:
    answered, failed = ends("answered"), ends("deadline_exceeded")
    book = Timelines("i-1")
    begun(book)
    book.end("r", JobFault("deadline_exceeded", "x" * 5000), 9.0)
    book.end("r", None, 9.0)
    (story,) = book.tell("r")
    assert story.fault == "deadline_exceeded"
    assert len(story.message) == 2000
    assert (ends("answered") - answered, ends("deadline_exceeded") - failed) == (0, 1)


async def test_a_request_that_was_never_stored_has_no_story_and_counts_as_no_end() -> None:
    answered = ends("answered")
    book = Timelines("i-1")
    begun(book)
    book.drop("r")
    book.end("r", None, 9.0)
    assert not book.tell("r")
    assert ends("answered") == answered


async def test_only_the_last_ones_are_kept_and_returned() -> None:
    book = Timelines("i-1", ended=20)
    for number in range(40):
        begun(book, f"r{number}", name="same")
        book.end(f"r{number}", None, 9.0)
    assert not book.tell("r19")
    assert book.tell("r20")
    assert [story.id for story in book.tell("same")] == [f"r{number}" for number in range(40 - MOST_STORIES, 40)]


async def test_a_request_that_moves_for_ever_fills_no_memory() -> None:
    book = Timelines("i-1")
    _, timeline = begun(book)
    for attempt in range(1, MOST_EVENTS + 11):
        timeline.add(JobEvent("moved", "r", attempt, "w"), 6.0)
    (story,) = book.tell("r")
    assert (len(story.events), story.lost_events) == (MOST_EVENTS, 10)


async def test_events_soon_after_the_end_belong_to_it_and_later_ones_are_those_of_no_request() -> None:
    book = Timelines("i-1")
    begun(book)
    book.end("r", None, 9.0)
    lately = book.get("r")
    assert lately is not None
    lately.add(JobEvent("prefilled", "r", 1, "w-1"), 9.5)
    assert [event.kind for event in book.tell("r")[0].events] == ["prefilled"]
    for number in range(LATE):
        begun(book, f"r{number}")
        book.end(f"r{number}", None, 9.0)
    assert book.get("r") is None
    assert [event.kind for event in book.tell("r")[0].events] == ["prefilled"]


@pytest.mark.parametrize("name", ["", "unknown"])
async def test_a_name_that_no_request_has_finds_nothing(name: str) -> None:
    book = Timelines("i-1")
    begun(book, name="mine")
    assert not book.tell(name)


def one(choices: int = 1) -> tuple[JobRecord, RequestTimeline]:
    return begun(Timelines("i"), choices=choices)


def test_a_request_that_never_started_has_no_worker_no_wait_and_no_attempt() -> None:
    assert one()[1].course() == Course(None, [], 0, [])


def test_the_wait_ends_with_the_first_start_and_workers_come_in_order_of_attempts() -> None:
    _, timeline = one()
    started(timeline, 1, "z", 0.5)
    started(timeline, 2, "a", 4.0)
    assert timeline.course()[:3] == (0.5, ["z", "a"], 2)


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize(("attempt", "attempts"), [(2, 2), (GENERATION, 2)])
def test_the_worker_of_the_last_run_counts_also_without_its_start(*, ended: bool, attempt: int, attempts: int) -> None:
    """The high number of an attempt that was submitted again does not count as so many."""
    record, timeline = one()
    started(timeline, 1, "z", 0.5)
    record.attempt, record.worker = attempt, "a"
    if ended:
        timeline.end(None, 9.0, "i")
    assert timeline.course()[1:3] == (["z", "a"], attempts)


def test_a_worker_that_had_it_twice_is_named_once() -> None:
    _, timeline = one()
    started(timeline, 1, "z", 0.5)
    started(timeline, 2, "z", 1.0)
    assert timeline.course()[1:3] == (["z"], 2)


def test_each_reason_to_finish_is_named_once_and_a_fault_is_none() -> None:
    record, timeline = one(3)
    record.finished = [Finish(reason="stop"), Finish(reason="length"), Finish(reason="error", fault=JobFault("x", "y"))]
    assert timeline.course().finish_reasons == ["stop", "length"]
    timeline.end(None, 9.0, "i")
    assert timeline.course().finish_reasons == ["stop", "length"]


class Router:
    """Answers a question for a decision; an exception is raised in place of the answer."""

    def __init__(self, answer: Explanation | bytes | Exception) -> None:
        self.answer = answer
        self.asked: list[str] = []

    async def request(self, subject: str, _question: bytes, *, timeout_s: float) -> bytes:
        self.asked.append(subject)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer if isinstance(self.answer, bytes) else encode(self.answer)


async def explained(timeline: RequestTimeline | None, router: Any, *, timeout_s: float = 5.0) -> Explanation:
    return await explain(timeline, "r", router, Subjects("hr"), timeout_s=timeout_s)


async def test_an_explanation_waits_for_the_placement_and_asks_the_router_that_made_it() -> None:
    _, timeline = one()
    router = Router(Explanation(id="r", worker="w", reason="cached"))
    asking = asyncio.create_task(explained(timeline, router))
    await asyncio.sleep(0)
    timeline.add(JobEvent("placed", "r", 1, "w", by="router-1"), 6.0)
    timeline.add(JobEvent("placed", "r", 2, "v", by="router-2"), 7.0)
    assert ((await asking).reason, router.asked) == ("cached", ["hr.ctl.router-1"])
    assert (await explained(timeline, router)).reason == "cached", "it can be asked for again"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (RequestTimeout("late"), "the router does not answer: "),
        (NoResponder("gone"), "the router does not answer: "),
        (b"rubbish", "the router's answer could not be read"),
    ],
)
async def test_a_decision_that_cannot_be_had_is_unknown_with_the_reason(answer: Any, reason: str) -> None:
    _, timeline = one()
    timeline.add(JobEvent("placed", "r", 1, "w", by="router-1"), 6.0)
    found = await explained(timeline, Router(answer))
    assert (found.known, found.reason[: len(reason)]) == (False, reason)


async def test_a_placement_by_the_worker_itself_or_of_which_nothing_is_heard_is_said_so() -> None:
    router = Router(Explanation(id="r"))
    _, timeline = one()
    assert (await explained(timeline, router, timeout_s=0.01)).reason == "nobody said in time who placed it"
    timeline.add(JobEvent("placed", "r", 1, "w"), 6.0)
    assert (await explained(timeline, router)).reason == "no router was running: the worker took it itself"
    assert not (await explained(None, router)).known
    assert router.asked == []
