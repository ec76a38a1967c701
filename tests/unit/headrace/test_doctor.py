"""What the exit code of `headrace doctor` says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from headrace.doctor import (
    SERVER_UNREACHABLE,
    Finding,
    Level,
    as_json,
    as_text,
    check_deployment,
    check_machine,
    check_server,
    error,
    exit_code,
    ok,
    unknown,
    warning,
)
from headrace.doctor_facts import (
    AccountLimits,
    ConsumerFacts,
    DeploymentFacts,
    MachineFacts,
    MonitoringFacts,
    PeerFacts,
    ServerFacts,
    StreamFacts,
    WorkerFacts,
)
from headrace.jetstream.provision import StreamPlan
from headrace.jetstream.subjects import Subjects

WARNING = warning("a.b", "odd", "look")
ERROR = error("a.b", "broken", "mend")


@pytest.mark.parametrize(
    ("findings", "code", "strict_code"),
    [
        ([], 0, 0),
        ([ok("a.b", "fine"), unknown("a.c", "not seen")], 0, 0),
        ([WARNING], 0, 1),
        ([WARNING, ERROR], 1, 1),
        ([ERROR, error(SERVER_UNREACHABLE, "gone", "start")], 69, 69),
    ],
)
def test_scripts_can_tell_what_has_to_be_mended(findings: list[Finding], code: int, strict_code: int) -> None:
    assert exit_code(findings) == code
    assert exit_code(findings, strict=True) == strict_code


GIB = 1 << 30
GOOD = MachineFacts(
    data_dir="/data",
    data_free=50 * GIB,
    data_mode=0o700,
    open_files=65536,
    shared_memory=8 * GIB,
    nats_server="2.15.1",
    engines={"vllm": None},
)


def levels(facts: MachineFacts) -> dict[str, Level]:
    return {finding.check: finding.level for finding in check_machine(facts)}


def test_a_good_machine_has_nothing_to_look_at() -> None:
    assert set(levels(GOOD).values()) == {"ok"}


@pytest.mark.parametrize(
    ("facts", "check", "level"),
    [
        (replace(GOOD, data_free=GIB), "machine.disk", "warning"),
        (replace(GOOD, data_free=10 << 20), "machine.disk", "error"),
        (replace(GOOD, data_free=None), "machine.disk", "unknown"),
        (replace(GOOD, data_mode=0o755), "machine.data_folder", "warning"),
        (replace(GOOD, open_files=1024), "machine.open_files", "warning"),
        (replace(GOOD, open_files=256), "machine.open_files", "error"),
        (replace(GOOD, shared_memory=64 << 20), "machine.shared_memory", "warning"),
        (replace(GOOD, nats_server=None), "machine.nats_server", "warning"),
        (replace(GOOD, engines={"vllm": "no compiler"}), "machine.engine", "warning"),
        (replace(GOOD, engines={}), "machine.engine", "unknown"),
    ],
)
def test_each_fault_is_found_and_says_what_to_do(facts: MachineFacts, check: str, level: Level) -> None:
    (finding,) = [f for f in check_machine(facts) if f.level != "ok"]
    assert (finding.check, finding.level) == (check, level)
    assert finding.remedy or level == "unknown"


KEPT = (StreamPlan("HR_REQ", "keep"), StreamPlan("HR_WORK", "keep"))
SERVER_CHECKS_GOOD = ServerFacts(
    version="2.15.1",
    max_payload=1 << 20,
    plans=KEPT,
    skew_s=0.01,
    skew_bound_s=0.02,
    monitoring=MonitoringFacts(max_memory=1 << 30, max_storage=1 << 40, sync_interval_s=0.0),
)
THREE = StreamFacts(
    name="HR_REQ", replicas=3, leader="n1", peers=(PeerFacts(name="n2", current=True), PeerFacts(name="n3", current=True))
)


def cluster(stream: StreamFacts) -> ServerFacts:
    return replace(SERVER_CHECKS_GOOD, cluster="c", streams=(stream,))


def monitoring(**changed: float) -> ServerFacts:
    assert SERVER_CHECKS_GOOD.monitoring is not None
    return replace(SERVER_CHECKS_GOOD, monitoring=replace(SERVER_CHECKS_GOOD.monitoring, **changed))


def test_a_good_server_has_nothing_to_look_at() -> None:
    assert {f.level for f in check_server(SERVER_CHECKS_GOOD)} == {"ok"}
    assert {f.level for f in check_server(cluster(THREE))} == {"ok"}


@pytest.mark.parametrize(
    ("facts", "check", "level"),
    [
        (replace(SERVER_CHECKS_GOOD, version="2.15.0"), "server.version", "warning"),
        (replace(SERVER_CHECKS_GOOD, denied=("$JS.API.INFO",)), "server.permissions", "error"),
        (replace(SERVER_CHECKS_GOOD, limits=AccountLimits(memory=0)), "server.memory_store", "error"),
        (monitoring(max_memory=0), "server.memory_store", "error"),
        (replace(SERVER_CHECKS_GOOD, limits=AccountLimits(storage=100, used_storage=95)), "server.file_store", "error"),
        (replace(SERVER_CHECKS_GOOD, limits=AccountLimits(streams=1)), "server.streams", "error"),
        (replace(SERVER_CHECKS_GOOD, max_payload=65536), "server.max_payload", "error"),
        (monitoring(sync_interval_s=1.0), "server.sync", "warning"),
        (replace(SERVER_CHECKS_GOOD, monitoring=None), "server.sync", "unknown"),
        (replace(SERVER_CHECKS_GOOD, plans=(StreamPlan("HR_REQ", "create"), KEPT[1])), "deployment.streams", "error"),
        (replace(SERVER_CHECKS_GOOD, plans=(StreamPlan("HR_REQ", "create"),)), "deployment.streams", "error"),
        (replace(SERVER_CHECKS_GOOD, plans=(StreamPlan("HR_REQ", "update"), KEPT[1])), "deployment.streams", "warning"),
        (cluster(StreamFacts(name="HR_REQ", leader="n1")), "server.replication", "warning"),
        (cluster(StreamFacts(name="HR_LOAD", storage="memory", leader="n1")), "server.replication", "warning"),
        (cluster(replace(THREE, replicas=2)), "server.replication", "warning"),
        (cluster(replace(THREE, consumers=(ConsumerFacts(name="W_a", copies=2),))), "server.peers", "error"),
        (cluster(replace(THREE, leader="")), "server.peers", "error"),
        (cluster(replace(THREE, peers=(PeerFacts(name="n2", current=False, offline=True),))), "server.peers", "error"),
        (cluster(replace(THREE, peers=(PeerFacts(name="n2", current=False),))), "server.peers", "warning"),
        (cluster(replace(THREE, peers=(PeerFacts(name="n2", current=True, lag=5000),))), "server.peers", "warning"),
        (cluster(replace(THREE, max_bytes=100, bytes=99)), "deployment.stream_bytes", "warning"),
        (replace(SERVER_CHECKS_GOOD, skew_s=-2.0), "server.clock", "warning"),
        (replace(SERVER_CHECKS_GOOD, skew_s=60.0), "server.clock", "error"),
        (replace(SERVER_CHECKS_GOOD, skew_s=None), "server.clock", "unknown"),
    ],
)
def test_server_checks_each_fault_is_found_and_says_what_to_do(facts: ServerFacts, check: str, level: Level) -> None:
    found = [f for f in check_server(facts) if f.level != "ok"]
    assert [(f.check, f.level) for f in found] == [(check, level)]
    assert found[0].remedy or level == "unknown"


def test_one_copy_is_enough_for_what_is_computed_again() -> None:
    facts = cluster(StreamFacts(name="OBJ_hr_embeddings", leader="n1", one_copy=True))
    assert {f.level for f in check_server(facts)} == {"ok"}


def test_a_slow_answer_is_no_wrong_clock() -> None:
    slow = replace(SERVER_CHECKS_GOOD, skew_s=6.0, skew_bound_s=6.0)
    assert {f.level for f in check_server(slow)} == {"ok"}


NAMES = Subjects("hr")
WORKER = WorkerFacts(id="w-1", pool="p", model="m", role="aggregated", engine="sim", engine_version="1")
DEPLOYMENT_CHECKS_GOOD = DeploymentFacts(workers=(WORKER,), routers={"p": 1}, ingresses=1)
PREFILL, DECODE = replace(WORKER, id="w-2", role="prefill", handover="nixl"), replace(WORKER, role="decode", handover="nixl")


def found(facts: DeploymentFacts, streams: Sequence[StreamFacts] = ()) -> list[Finding]:
    return [f for f in check_deployment(facts, streams, NAMES) if f.level != "ok"]


def work(*consumers: ConsumerFacts) -> list[StreamFacts]:
    return [StreamFacts(name="HR_WORK", consumers=consumers)]


def test_a_good_deployment_has_nothing_to_look_at() -> None:
    assert found(DEPLOYMENT_CHECKS_GOOD, work(ConsumerFacts(name="W_w-1", waiting=3, unacked=4))) == []
    assert found(replace(DEPLOYMENT_CHECKS_GOOD, workers=(PREFILL, DECODE), waiting={"p": 7})) == []


@pytest.mark.parametrize(
    ("facts", "check", "level"),
    [
        (replace(DEPLOYMENT_CHECKS_GOOD, ingresses=0), "deployment.frontends", "warning"),
        (DeploymentFacts(ingresses=1), "deployment.workers", "error"),
        (replace(DEPLOYMENT_CHECKS_GOOD, routers={"another": 1}), "deployment.routers", "warning"),
        (replace(DEPLOYMENT_CHECKS_GOOD, workers=(replace(WORKER, answers=False),)), "deployment.silent", "error"),
        (replace(DEPLOYMENT_CHECKS_GOOD, waiting={"gone": 2}), "deployment.waiting", "error"),
        (
            replace(DEPLOYMENT_CHECKS_GOOD, workers=(WORKER, replace(WORKER, id="w-2", engine_version="2"))),
            "deployment.engines",
            "warning",
        ),
        (replace(DEPLOYMENT_CHECKS_GOOD, workers=(PREFILL,)), "deployment.roles", "error"),
        (replace(DEPLOYMENT_CHECKS_GOOD, workers=(DECODE,)), "deployment.roles", "warning"),
        (replace(DEPLOYMENT_CHECKS_GOOD, workers=(PREFILL, replace(DECODE, handover=""))), "deployment.handover", "warning"),
    ],
)
def test_deployment_checks_each_fault_is_found_and_says_what_to_do(facts: DeploymentFacts, check: str, level: Level) -> None:
    (finding,) = found(facts)
    assert (finding.check, finding.level) == (check, level)
    assert finding.remedy


def test_engines_may_differ_between_fleets_and_not_within_one() -> None:
    one, other = replace(WORKER, fleet="a"), replace(WORKER, id="w-2", engine_version="2", fleet="b")
    assert found(replace(DEPLOYMENT_CHECKS_GOOD, workers=(one, other))) == []
    (finding,) = found(replace(DEPLOYMENT_CHECKS_GOOD, workers=(one, replace(other, fleet="a"))))
    assert finding.check == "deployment.engines"
    assert "fleet a of pool" in str(finding)


def test_placed_work_of_a_worker_that_is_gone_is_an_error_and_its_empty_consumer_is_none() -> None:
    (finding,) = found(
        DEPLOYMENT_CHECKS_GOOD, work(ConsumerFacts(name="W_w-1"), ConsumerFacts(name="W_w-0", waiting=1, unacked=2))
    )
    assert finding.level == "error"
    assert "W_w-0 (3)" in finding.text
    assert found(DEPLOYMENT_CHECKS_GOOD, work(ConsumerFacts(name="W_w-0"))) == []


FOUND = [ok("a", "all well"), error("b", "broken", "mend it")]


def test_a_remedy_stands_below_its_finding_and_the_last_line_counts() -> None:
    assert as_text(FOUND, colour=False).splitlines() == [
        "ok     all well",
        "ERROR  broken",
        "       → mend it",
        "",
        "1 fine, 1 to mend",
    ]


def test_colour_changes_no_column() -> None:
    plain, coloured = as_text(FOUND, colour=False), as_text(FOUND, colour=True)
    assert "\x1b[31mERROR\x1b[0m  broken" in coloured
    assert "\x1b" not in plain


def test_programs_get_every_field() -> None:
    assert json.loads(as_json(FOUND))[1] == {"check": "b", "level": "error", "text": "broken", "remedy": "mend it"}
