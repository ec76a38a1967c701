"""The rules of durable work, each with a way to take it out of force.

`test_guards.py` shows that the search finds what breaks without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.broker.durable import intake, stream_writer
from headrace.broker.durable.carrier import JobSweeper
from headrace.broker.durable.held_job import HeldJob
from headrace.broker.durable.intake import JobAdmission
from headrace.broker.durable.job_end import JobEnder
from headrace.broker.durable.job_run import CrashWriter, JobRunner
from headrace.broker.durable.results import OutsideEnds, ResultStore
from headrace.broker.durable.stream_writer import DurableStreamWriter
from headrace.broker.ingress.submission import Submission
from headrace.broker.messages.durable import JobResult
from headrace.broker.protocol.resume import Resume
from headrace.jetstream.errors import JetStreamError

Guard = Callable[[pytest.MonkeyPatch], None]
GUARDS: dict[str, Guard] = {}


def guard(function: Guard) -> Guard:
    GUARDS[function.__name__] = function
    return function


async def _nothing(*_: object, **__: object) -> None:
    return None


# -- results ------------------------------------------------------------------------------------------------------------------


@guard
def a_refused_result_is_not_one_that_exists(patch: pytest.MonkeyPatch) -> None:
    async def seen(_self: ResultStore, _tenant: str, _token: str) -> JobResult:
        return JobResult(id="", status="done")

    patch.setattr(ResultStore, "_seen", seen)


@guard
def an_object_is_deleted_only_when_another_result_is_seen(patch: pytest.MonkeyPatch) -> None:
    real = ResultStore._seen

    async def seen(self: ResultStore, tenant: str, token: str) -> JobResult | None:
        store: Any = self._objects
        for name in list(store._store):
            if name.startswith(f"{tenant}.{token}."):
                await store.delete(name)
        return await real(self, tenant, token)

    patch.setattr(ResultStore, "_seen", seen)


@guard
def a_result_is_created_once(patch: pytest.MonkeyPatch) -> None:
    real = ResultStore.commit

    async def commit(self: ResultStore, tenant: str, token: str, result: JobResult) -> JobResult:
        stands = await real(self, tenant, token, result)
        return stands if stands.status == result.status else result

    patch.setattr(ResultStore, "commit", commit)


@guard
def a_job_is_acked_after_its_result(patch: pytest.MonkeyPatch) -> None:
    real = JobRunner.run

    async def run(self: JobRunner, held: HeldJob) -> bool:
        held.delivery.ack()
        return await real(self, held)

    patch.setattr(JobRunner, "run", run)


# -- streams ------------------------------------------------------------------------------------------------------------------


@guard
def the_end_is_in_the_stream_before_the_result(patch: pytest.MonkeyPatch) -> None:
    real = JobEnder.end_with

    async def end_with(self: JobEnder, held: HeldJob, result: JobResult, **options: Any) -> bool:
        await self._deps.results.commit(held.job.tenant, held.job.token, result)
        return await real(self, held, result, **options)

    patch.setattr(JobEnder, "end_with", end_with)


@guard
def entries_name_the_last_one(patch: pytest.MonkeyPatch) -> None:
    real = DurableStreamWriter.settle

    async def settle(self: DurableStreamWriter) -> None:
        while self._unsettled is not None:
            kind, data = self._unsettled
            try:
                stored = await self._messaging.publish(self._subject, data)
            except JetStreamError:
                await real(self)
            else:
                self._landed(kind, stored.seq)

    patch.setattr(DurableStreamWriter, "settle", settle)


@guard
def an_entry_of_another_writer_is_a_loss(patch: pytest.MonkeyPatch) -> None:
    real = stream_writer.after_refusal

    def after(last: Any, **known: Any) -> str:
        outcome = real(last, **known)
        return "landed" if outcome == "lost" else outcome

    patch.setattr(stream_writer, "after_refusal", after)


@guard
def a_stream_is_folded_before_its_job_is_submitted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Resume, "fresh", property(lambda _self: True))


@guard
def the_end_of_a_stream_is_read_before_anything_else(patch: pytest.MonkeyPatch) -> None:
    real = intake.read_stream

    async def read(*args: Any) -> Any:
        state = await real(*args)
        state.end = None
        return state

    patch.setattr(intake, "read_stream", read)


@guard
def what_resumes_is_claimed(patch: pytest.MonkeyPatch) -> None:
    real = Submission.publish

    async def publish(self: Submission, job: Any, body: bytes, *, resume: Resume | None = None) -> Any:
        return await real(self, job, body)

    patch.setattr(Submission, "publish", publish)


# -- ends ---------------------------------------------------------------------------------------------------------------------


@guard
def a_canceller_is_told_the_end_that_stands(patch: pytest.MonkeyPatch) -> None:
    real = OutsideEnds.end_either

    async def end_either(self: OutsideEnds, job: Any, result: JobResult, fault: Any = None) -> str:
        await real(self, job, result, fault)
        return result.status

    patch.setattr(OutsideEnds, "end_either", end_either)


@guard
def a_stream_is_cancelled_in_the_stream(patch: pytest.MonkeyPatch) -> None:
    async def end_either(self: OutsideEnds, job: Any, result: JobResult, fault: Any = None) -> str:
        return (await self._results.commit(job.tenant, job.token, result)).status

    patch.setattr(OutsideEnds, "end_either", end_either)


@guard
def a_malformed_job_has_an_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("headrace.broker.durable.intake.MalformedJobs.end", lambda *_: None)


@guard
def jobs_without_a_carrier_are_swept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JobSweeper, "sweep", _nothing)


# -- poison -------------------------------------------------------------------------------------------------------------------


@guard
def carriers_that_died_of_a_job_are_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(intake, "is_carrier_poison", lambda _state, _dead: False)


@guard
def a_carrier_that_goes_on_says_so(patch: pytest.MonkeyPatch) -> None:
    """Without `ok` each taker of a plain job looks as if it had died of it."""
    patch.setattr(JobRunner, "_append_ok", _nothing)


@guard
def deliveries_are_no_evidence(patch: pytest.MonkeyPatch) -> None:
    async def poison(_self: JobAdmission, held: HeldJob) -> bool:
        return held.num_delivered > 3

    patch.setattr(JobAdmission, "_is_poison", poison)


@guard
def a_crash_is_stored_before_the_next_worker_goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CrashWriter, "recorded", lambda _self, _crashes: True)
