"""Jobs that no carrier may ever take get an end all the same."""

from headrace.broker.durable.carrying.sweep import verdict
from headrace.broker.durable.stored_job import StoredJob, parse_job
from headrace.broker.messages import HEADER_BATCH, HEADER_DEADLINE


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
