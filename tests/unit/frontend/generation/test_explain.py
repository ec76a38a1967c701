"""The fields of a request's log line, also of a request that became several jobs."""

from __future__ import annotations

from headrace.broker.ingress.timeline import Journey
from headrace.broker.jobs import Job
from headrace.broker.messages.frames import Finish, JobFault, Row
from headrace.broker.protocol.job_record import JobRecord
from headrace.frontend.generation.explain import RequestStory
from headrace.frontend.generation.plan import Plan
from headrace.frontend.generation.sse import UsageCounter
from tests.support.frontend.fakes import CARD, MODEL


class Reader:
    def take(self, row: Row) -> bool:
        return True

    def end(self, fault: JobFault | None) -> None:
        pass


def journey(*workers: str, queue_s: float, reason: str = "stop") -> Journey:
    record = JobRecord("r", "p", 1, Reader(), 0.0)
    record.finished = [Finish(reason=reason)]  # type: ignore[arg-type]
    travelled = Journey(record, 0.0)
    for attempt, worker in enumerate(workers, start=1):
        travelled.started(attempt, worker, queue_s)
        record.attempt, record.worker = attempt, worker
    return travelled


def story(jobs: int) -> RequestStory:
    one = Job(id="r", card=CARD, prompt_tokens=5, tenant="acme")
    return RequestStory(Plan([one] * jobs, None, UsageCounter([5] * jobs, 1)))  # type: ignore[arg-type]  # has no answer


def test_several_jobs_are_told_as_one_request_with_its_longest_wait_and_most_attempts() -> None:
    told = story(2)
    told.submitted([journey("a", queue_s=0.5, reason="length"), journey("b", "a", queue_s=2.0)])
    assert told.fields() == {
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


def test_what_was_not_heard_of_is_left_out() -> None:
    told = story(1)
    told.submitted([None])
    assert told.fields().keys() == {"model", "tenant", "class", "prompt_tokens", "completion_tokens"}
