"""The steward's rules: who gets which consumer."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.jetstream.errors import SubjectError
from headrace.jetstream.logins.roles import Login
from headrace.jetstream.logins.steward import login_of, refusal
from headrace.jetstream.specs import consumer_config
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import (
    Topology,
    job_consumer,
    prefill_consumer,
    request_consumer,
    work_consumer,
)

S = Subjects("hr")
TOPOLOGY = Topology(S)
WORKER = Login("worker", "p")


def wish(spec: Any, **changed: Any) -> tuple[str, dict[str, Any]]:
    config = {**consumer_config(spec), **changed}
    return f"CONSUMER.CREATE.{spec.stream}.{spec.name}.{spec.filter_subjects[0]}", {
        "stream_name": spec.stream,
        "config": config,
    }


def refused(login: Login, spec: Any, **changed: Any) -> str:
    return refusal(TOPOLOGY, login, *wish(spec, **changed))


@pytest.mark.parametrize(
    ("login", "spec"),
    [
        (WORKER, work_consumer(S, "p", "w1")),
        (WORKER, prefill_consumer(S, "p")),
        (WORKER, prefill_consumer(S, "p", "w1")),
        (WORKER, request_consumer(S, "p", "std")),
        (WORKER, request_consumer(S, "p", "re")),
        (Login("worker"), work_consumer(S, "p", "w1")),
        (Login("router"), request_consumer(S, "p", "hi")),
        (Login("router", "p"), request_consumer(S, "p", "batch")),
        (Login("ingress"), job_consumer(S, "sim")),
    ],
)
def test_a_role_gets_the_consumers_that_it_works_with(login: Login, spec: Any) -> None:
    assert refused(login, spec) == ""


@pytest.mark.parametrize(
    ("login", "spec"),
    [
        (WORKER, work_consumer(S, "q", "w1")),
        (WORKER, prefill_consumer(S, "q")),
        (WORKER, request_consumer(S, "q", "std")),
        (WORKER, job_consumer(S, "sim")),
        (Login("ingress"), work_consumer(S, "p", "w1")),
        (Login("ingress"), request_consumer(S, "p", "std")),
        (Login("router", "p"), request_consumer(S, "q", "std")),
        (Login("console"), request_consumer(S, "p", "std")),
        (Login("batch", "acme"), job_consumer(S, "sim")),
    ],
)
def test_a_role_gets_no_other_consumers(login: Login, spec: Any) -> None:
    assert "has no such consumers" in refused(login, spec)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"deliver_subject": "hr.ctl.w9"}, "'deliver_subject' cannot be chosen"),
        ({"filter_subject": "hr.work.q.w1"}, "the filter is not"),
        ({"filter_subjects": ["hr.work.q.w1"]}, "'filter_subjects' cannot be chosen"),
        ({"durable_name": "W_other"}, "the name is not"),
        ({"name": "W_other"}, "the name is not"),
        ({"sample_freq": "100%"}, "'sample_freq' cannot be chosen"),
    ],
)
def test_a_configuration_that_says_something_else_than_its_call_is_refused(changed: dict[str, Any], says: str) -> None:
    assert says in refused(WORKER, work_consumer(S, "p", "w1"), **changed)


@pytest.mark.parametrize(
    "call",
    [
        "STREAM.DELETE.HR_WORK",
        "CONSUMER.CREATE.HR_WORK.W_w1",
        "CONSUMER.CREATE.HR_WORK.x y.hr.work.p.w1",
        "CONSUMER.CREATE.HR_WORK.x\r\nPUB a 0\r\n.hr.work.p.w1",
        "CONSUMER.CREATE.HR_WORK.W_w1.hr.work.p.w1\n",
    ],
)
def test_a_call_is_refused_that_is_none_or_would_be_several(call: str) -> None:
    _, body = wish(work_consumer(S, "p", "w1"))
    assert refusal(TOPOLOGY, WORKER, call, body)


def test_the_subject_says_who_asks() -> None:
    for login in (WORKER, Login("router"), Login("batch", "acme"), Login("worker", "p", "w1"), Login("worker", "", "w1")):
        assert login_of(login.steward("hr"), TOPOLOGY) == login
    for subject in ("hr.steward.emperor._", "hr.steward.worker", "hr.steward.router.p.q", "hr.steward.worker.p.q.r"):
        with pytest.raises(SubjectError):
            login_of(subject, TOPOLOGY)


@pytest.mark.parametrize("end", ["\r\nPUB x 0\r\n", "\n", " ", "\t"])
def test_a_call_that_could_end_the_line_of_a_command_is_refused(end: str) -> None:
    """It would be written as it is into the steward's connection, which is an operator's."""
    call, body = wish(work_consumer(S, "p", "w1"))
    body["config"]["filter_subject"] += end
    assert refusal(TOPOLOGY, WORKER, call + end, body) == "it is no call that makes a consumer with a filter"


@pytest.mark.parametrize(
    "changed",
    [{"stream_name": "HR_REQ"}, {"stream_name": None}, {"action": "update"}, {"config": None}, {"config": []}],
)
def test_a_body_that_is_no_configuration_of_that_stream_is_refused(changed: dict[str, Any]) -> None:
    call, body = wish(work_consumer(S, "p", "w1"))
    assert refusal(TOPOLOGY, WORKER, call, {**body, **changed}).startswith("the body is no configuration")
