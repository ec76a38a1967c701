"""A publisher may name a subject for its answer, but none that does anything else; steps of jobs are told of."""

from types import SimpleNamespace

import msgspec
import pytest

from headrace.broker.durable.names import JobRef
from headrace.broker.durable.quota import JobNotices, may_reply
from headrace.broker.messages.durable import JobProgress, JobResult
from headrace.jetstream.subjects import Subjects


@pytest.mark.parametrize("subject", ["_INBOX.abc.1", "answers", "my.answers.a-1"])
def test_a_result_may_be_sent_to_a_publishers_own_subject(subject: str) -> None:
    assert may_reply(subject, "hr")


@pytest.mark.parametrize(
    "subject",
    ["", "$JS.API.STREAM.DELETE.HR_JOB", "hr.job.m.t", "hr.ctl.w1", "a b", "a\r\nPUB b 0", "a.*", "a.>", "a..b", "x" * 257],
)
def test_a_result_is_not_sent_to_the_server_or_to_our_own_subjects(subject: str) -> None:
    assert not may_reply(subject, "hr")


@pytest.mark.parametrize(("batch", "told"), [("", ["taken", "finished"]), ("batch_1", [])])
def test_lines_of_a_batch_tell_of_nothing_beside_their_results(batch: str, told: list[str]) -> None:
    sent: list[str] = []
    messaging = SimpleNamespace(send=lambda _subject, data: sent.append(msgspec.json.decode(data, type=JobProgress).event))
    notices = JobNotices(messaging, Subjects("hr"), carrier="c")  # type: ignore[arg-type]
    job = JobRef(tenant="t", name="j", batch=batch)
    notices.step(job, "taken")
    notices.finished(job, JobResult(id="j", status="done"))
    assert sent == told


def test_a_line_of_a_batch_has_a_copy_of_its_result_sent_if_it_asks_for_one() -> None:
    sent: list[str] = []
    messaging = SimpleNamespace(send=lambda subject, _data: sent.append(subject))
    notices = JobNotices(messaging, Subjects("hr"), carrier="c")  # type: ignore[arg-type]
    notices.finished(JobRef(tenant="t", name="j", batch="batch_1"), JobResult(id="j", status="done"), "answers")
    assert sent == ["answers"]
