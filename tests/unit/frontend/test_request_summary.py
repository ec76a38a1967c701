"""The fields of a request's log line, also of a request that became several jobs."""

from __future__ import annotations

from headrace.broker.ingress.timeline import RequestTimeline, Timelines
from headrace.broker.jobs import Job
from headrace.broker.messages.frames import Finish
from headrace.frontend.generation.sse import UsageCounter
from headrace.frontend.request_audit import RequestSummary
from tests.support.frontend.fakes import CARD, MODEL, FakeAnswer
from tests.support.timelines import begun, started


def answer(*workers: str, queue_s: float, reason: str = "stop") -> FakeAnswer:
    record, timeline = begun(Timelines("i"))
    record.finished = [Finish(reason=reason)]  # type: ignore[arg-type]
    for attempt, worker in enumerate(workers, start=1):
        started(timeline, attempt, worker, queue_s)
        record.attempt, record.worker = attempt, worker
    return answer_of(timeline)


def answer_of(timeline: RequestTimeline | None) -> FakeAnswer:
    made = FakeAnswer(())
    made.timeline = timeline
    return made


def summary(jobs: int) -> RequestSummary:
    one = Job(id="r", card=CARD, prompt_tokens=5, tenant="acme")
    return RequestSummary([one] * jobs, UsageCounter([5] * jobs, 1))


async def test_several_jobs_are_logged_as_one_request_with_its_longest_wait_and_most_attempts() -> None:
    made = summary(2)
    made.submitted([answer("a", queue_s=0.5, reason="length"), answer("b", "a", queue_s=2.0)])
    assert made.fields() == {
        "model": MODEL,
        "tenant": "acme",
        "class": "std",
        "jobs": 2,
        "prompt_tokens": 10,
        "completion_tokens": 0,
        "queue_s": 2.0,
        "workers": ["a", "b"],
        "attempts": 2,
        "finish_reason": "length,stop",
    }
    assert made.attempts == 2
