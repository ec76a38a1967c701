"""What `headrace doctor` says of the parts that run, and of work that no part owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from headrace.doctor.deployment_checks import check_deployment
from headrace.doctor.facts import ConsumerFacts, DeploymentFacts, StreamFacts, WorkerFacts
from headrace.doctor.findings import Finding, Level
from headrace.jetstream.subjects import Subjects

NAMES = Subjects("hr")
WORKER = WorkerFacts(id="w-1", pool="p", model="m", role="aggregated", engine="sim", engine_version="1")
GOOD = DeploymentFacts(workers=(WORKER,), routers={"p": 1}, ingresses=1)
PREFILL, DECODE = replace(WORKER, id="w-2", role="prefill", handover="nixl"), replace(WORKER, role="decode", handover="nixl")


def found(facts: DeploymentFacts, streams: Sequence[StreamFacts] = ()) -> list[Finding]:
    return [f for f in check_deployment(facts, streams, NAMES) if f.level != "ok"]


def work(*consumers: ConsumerFacts) -> list[StreamFacts]:
    return [StreamFacts(name="HR_WORK", consumers=consumers)]


def test_a_good_deployment_has_nothing_to_look_at() -> None:
    assert found(GOOD, work(ConsumerFacts(name="W_w-1", waiting=3, unacked=4))) == []
    assert found(replace(GOOD, workers=(PREFILL, DECODE), waiting={"p": 7})) == []


@pytest.mark.parametrize(
    ("facts", "check", "level"),
    [
        (replace(GOOD, ingresses=0), "deployment.frontends", "warning"),
        (DeploymentFacts(ingresses=1), "deployment.workers", "error"),
        (replace(GOOD, routers={"another": 1}), "deployment.routers", "warning"),
        (replace(GOOD, workers=(replace(WORKER, answers=False),)), "deployment.silent", "error"),
        (replace(GOOD, waiting={"gone": 2}), "deployment.waiting", "error"),
        (replace(GOOD, workers=(WORKER, replace(WORKER, id="w-2", engine_version="2"))), "deployment.engines", "warning"),
        (replace(GOOD, workers=(PREFILL,)), "deployment.roles", "error"),
        (replace(GOOD, workers=(DECODE,)), "deployment.roles", "warning"),
        (replace(GOOD, workers=(PREFILL, replace(DECODE, handover=""))), "deployment.handover", "warning"),
    ],
)
def test_each_fault_is_found_and_says_what_to_do(facts: DeploymentFacts, check: str, level: Level) -> None:
    (finding,) = found(facts)
    assert (finding.check, finding.level) == (check, level)
    assert finding.remedy


def test_engines_may_differ_between_fleets_and_not_within_one() -> None:
    one, other = replace(WORKER, fleet="a"), replace(WORKER, id="w-2", engine_version="2", fleet="b")
    assert found(replace(GOOD, workers=(one, other))) == []
    (finding,) = found(replace(GOOD, workers=(one, replace(other, fleet="a"))))
    assert finding.check == "deployment.engines"
    assert "fleet a of pool" in str(finding)


def test_placed_work_of_a_worker_that_is_gone_is_an_error_and_its_empty_consumer_is_none() -> None:
    (finding,) = found(GOOD, work(ConsumerFacts(name="W_w-1"), ConsumerFacts(name="W_w-0", waiting=1, unacked=2)))
    assert finding.level == "error"
    assert "W_w-0 (3)" in finding.text
    assert found(GOOD, work(ConsumerFacts(name="W_w-0"))) == []
