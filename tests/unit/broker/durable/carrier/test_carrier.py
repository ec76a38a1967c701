"""Jobs that no carrier may ever take get an end all the same."""

from types import SimpleNamespace

import pytest

from headrace.broker.codec import encode
from headrace.broker.durable.carrier import JobSweeper, verdict
from headrace.broker.durable.names import JobRef
from headrace.broker.durable.results import OutsideEnds, ResultStore, decode_result
from headrace.broker.durable.stored_job import StoredJob, parse_job
from headrace.broker.messages.durable import HEADER_BATCH, HEADER_DEADLINE, HEADER_JOB, HEADER_STREAM, JobResult, StreamEntry
from headrace.broker.messages.frames import JobFault
from headrace.broker.settings import CarrierSettings
from headrace.jetstream.ports import StoredMessage
from headrace.jetstream.subjects import Subjects
from tests.unit.broker.durable.fakes import FakeStreams


def job(deadline: float, batch: str = "") -> StoredJob:
    headers = {HEADER_DEADLINE: str(deadline), HEADER_BATCH: batch} if batch else {HEADER_DEADLINE: str(deadline)}
    return parse_job(b"{}", headers, tenant="t", seq=1, stored=100.0)


def status(of: StoredJob, now: float, *, known: bool = True) -> str | None:
    result = verdict(of, known=known, now=now, margin_s=30.0, unknown_model_s=60.0)
    return result.status if result is not None else None


def test_a_job_expires_a_margin_after_its_deadline() -> None:
    assert status(job(200.0), 229.0) is None
    assert status(job(200.0), 230.0) == "expired"


def test_a_job_for_an_unknown_model_fails_after_a_patience() -> None:
    assert status(job(900.0), 159.0, known=False) is None
    assert status(job(900.0), 160.0) is None
    assert status(job(900.0), 160.0, known=False) == "failed"
    result = verdict(job(900.0), known=False, now=160.0, margin_s=30.0, unknown_model_s=60.0)
    assert result is not None
    assert result.response is not None
    assert result.response.status_code == 404
    assert b"model_not_found" in bytes(result.response.body)


def test_an_expired_line_of_a_batch_has_the_code_of_batches() -> None:
    for batch, code in (("b", "batch_expired"), ("", "job_expired")):
        result = verdict(job(200.0, batch), known=True, now=500.0, margin_s=30.0, unknown_model_s=60.0)
        assert result is not None
        assert result.error is not None
        assert result.error.code == code


class Notices:
    """Counts the jobs that were told of."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def finished(self, job: JobRef, result: JobResult, reply: str = "") -> None:
        self.told.append(result.status)


@pytest.mark.parametrize("earlier", [False, True])
async def test_a_durable_job_for_an_unknown_model_has_a_result_also_after_a_sweeper_that_died(earlier: bool) -> None:
    streams, names, notices = SweptStreams(), Subjects("hr"), Notices()
    if earlier:  # it wrote the end and died before the result
        fault = JobFault("model_not_found", "no model")
        streams.put("hr.rsp.t.j", encode(StreamEntry(nonce="c", n=1, kind="end", status="failed", fault=fault)))
    results = ResultStore(streams, names)  # type: ignore[arg-type]
    deps = SimpleNamespace(
        messaging=streams,
        subjects=names,
        results=results,
        ends=OutsideEnds(streams, names, results, wall=lambda: 500.0),  # type: ignore[arg-type]
        notices=notices,
        renderer=SimpleNamespace(serves=lambda _slug: False),
        settings=CarrierSettings(),
        wall=lambda: 10_000.0,
    )
    sweeper = JobSweeper(deps, lambda _slug: False)  # type: ignore[arg-type]
    headers = {HEADER_JOB: "j", HEADER_STREAM: "1", HEADER_DEADLINE: "90000"}
    await sweeper._look(StoredMessage("hr.job.gone.t", 7, b"{}", headers, 100.0))
    [stored] = streams.of("hr.result.t.j")
    result = decode_result(stored.data)
    assert (result.status, result.response and result.response.status_code) == ("failed", 404)
    assert streams.deleted == [7]
    assert notices.told == ["failed"]


class SweptStreams(FakeStreams):
    """Notes the jobs that were removed."""

    def __init__(self) -> None:
        super().__init__()
        self.deleted: list[int] = []

    async def delete_message(self, _stream: str, seq: int) -> bool:
        self.deleted.append(seq)
        return True
