"""A publisher may name a subject for its answer, but none that does anything else."""

import pytest

from headrace.broker.durable.carrying.notices import may_reply


@pytest.mark.parametrize("subject", ["_INBOX.abc.1", "answers", "my.answers.a-1"])
def test_a_result_may_be_sent_to_a_publishers_own_subject(subject: str) -> None:
    assert may_reply(subject, "hr")


@pytest.mark.parametrize(
    "subject",
    ["", "$JS.API.STREAM.DELETE.HR_JOB", "hr.job.m.t", "hr.ctl.w1", "a b", "a\r\nPUB b 0", "a.*", "a.>", "a..b", "x" * 257],
)
def test_a_result_is_not_sent_to_the_server_or_to_our_own_subjects(subject: str) -> None:
    assert not may_reply(subject, "hr")
