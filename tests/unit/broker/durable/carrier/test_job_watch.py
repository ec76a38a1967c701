"""Claims of held jobs are extended in time, and not those of jobs that have just come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headrace.broker.durable.carrier.held_job import HeldJobs
from headrace.broker.durable.carrier.job_watch import EXTEND_S, JobWatch
from headrace.jetstream.topology import JOB_ACK_WAIT_S
from tests.unit.broker.durable.carrier.test_held_job import held

LOOKS = 12


def extensions(looks: int, *, lease_held: bool = True) -> list[float]:
    """Return the seconds after which the claim of a job is extended that came right after a look."""
    jobs, now = HeldJobs(), 0.0
    seen: list[float] = []
    job: Any = held(1)
    job.delivery.progress = lambda: seen.append(now)
    jobs.add(job)
    deps: Any = SimpleNamespace(ingress=SimpleNamespace(lease_held=lease_held))
    watch = JobWatch(deps, jobs)
    for look in range(1, looks + 1):
        now = look * EXTEND_S
        watch.extend()
    return seen


def test_a_claim_outlives_the_loss_of_any_one_extension() -> None:
    times = [0.0, *extensions(LOOKS)]
    assert len(times) > LOOKS / 3
    assert all(after - before < JOB_ACK_WAIT_S for before, after in zip(times, times[2:], strict=False))


def test_a_job_that_ends_soon_is_not_extended() -> None:
    assert extensions(2) == []


def test_without_a_lease_no_claim_is_extended() -> None:
    assert extensions(LOOKS, lease_held=False) == []
