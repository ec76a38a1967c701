"""What an ingress remembers of a request's way."""

from __future__ import annotations

from headrace.broker import metrics
from headrace.broker.ingress.journey import Journey
from headrace.broker.messages import Finish, JobFault, Row
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.resume import GENERATION


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
