"""What `headrace doctor` says of a NATS server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.doctor.facts import AccountLimits, ConsumerFacts, MonitoringFacts, PeerFacts, ServerFacts, StreamFacts
from headrace.doctor.findings import Level
from headrace.doctor.server_checks import check_server
from headrace.jetstream.provision import StreamPlan

KEPT = (StreamPlan("HR_REQ", "keep"), StreamPlan("HR_WORK", "keep"))
GOOD = ServerFacts(
    version="2.15.1",
    max_payload=1 << 20,
    plans=KEPT,
    skew_s=0.01,
    skew_bound_s=0.02,
    monitoring=MonitoringFacts(max_memory=1 << 30, max_storage=1 << 40, sync_interval_s=2.0),
)
THREE = StreamFacts(
    name="HR_REQ", replicas=3, leader="n1", peers=(PeerFacts(name="n2", current=True), PeerFacts(name="n3", current=True))
)


def cluster(stream: StreamFacts) -> ServerFacts:
    return replace(GOOD, cluster="c", streams=(stream,))


def monitoring(**changed: float) -> ServerFacts:
    assert GOOD.monitoring is not None
    return replace(GOOD, monitoring=replace(GOOD.monitoring, **changed))


def test_a_good_server_has_nothing_to_look_at() -> None:
    assert {f.level for f in check_server(GOOD)} == {"ok"}
    assert {f.level for f in check_server(cluster(THREE))} == {"ok"}


@pytest.mark.parametrize(
    ("facts", "check", "level"),
    [
        (replace(GOOD, version="2.12.4"), "server.version", "warning"),
        (replace(GOOD, denied=("$JS.API.INFO",)), "server.permissions", "error"),
        (replace(GOOD, limits=AccountLimits(memory=0)), "server.memory_store", "error"),
        (monitoring(max_memory=0), "server.memory_store", "error"),
        (replace(GOOD, limits=AccountLimits(storage=100, used_storage=95)), "server.file_store", "error"),
        (replace(GOOD, limits=AccountLimits(streams=1)), "server.streams", "error"),
        (replace(GOOD, max_payload=65536), "server.max_payload", "error"),
        (monitoring(sync_interval_s=120.0), "server.sync_interval", "warning"),
        (replace(GOOD, monitoring=None), "server.sync_interval", "unknown"),
        (replace(GOOD, plans=(StreamPlan("HR_REQ", "create"), KEPT[1])), "deployment.streams", "error"),
        (replace(GOOD, plans=(StreamPlan("HR_REQ", "create"),)), "deployment.streams", "error"),
        (replace(GOOD, plans=(StreamPlan("HR_REQ", "update"), KEPT[1])), "deployment.streams", "warning"),
        (cluster(StreamFacts(name="HR_REQ", leader="n1")), "server.replication", "warning"),
        (cluster(StreamFacts(name="HR_LOAD", storage="memory", leader="n1")), "server.replication", "warning"),
        (cluster(replace(THREE, replicas=2)), "server.replication", "warning"),
        (cluster(replace(THREE, consumers=(ConsumerFacts(name="W_a", copies=2),))), "server.peers", "error"),
        (cluster(replace(THREE, leader="")), "server.peers", "error"),
        (cluster(replace(THREE, peers=(PeerFacts(name="n2", current=False, offline=True),))), "server.peers", "error"),
        (cluster(replace(THREE, peers=(PeerFacts(name="n2", current=False),))), "server.peers", "warning"),
        (cluster(replace(THREE, peers=(PeerFacts(name="n2", current=True, lag=5000),))), "server.peers", "warning"),
        (cluster(replace(THREE, max_bytes=100, bytes=99)), "deployment.stream_bytes", "warning"),
        (replace(GOOD, skew_s=-2.0), "server.clock", "warning"),
        (replace(GOOD, skew_s=60.0), "server.clock", "error"),
        (replace(GOOD, skew_s=None), "server.clock", "unknown"),
    ],
)
def test_each_fault_is_found_and_says_what_to_do(facts: ServerFacts, check: str, level: Level) -> None:
    found = [f for f in check_server(facts) if f.level != "ok"]
    assert [(f.check, f.level) for f in found] == [(check, level)]
    assert found[0].remedy or level == "unknown"


def test_one_copy_is_enough_for_what_is_computed_again() -> None:
    facts = cluster(StreamFacts(name="OBJ_hr_embeddings", leader="n1", one_copy=True))
    assert {f.level for f in check_server(facts)} == {"ok"}


def test_a_slow_answer_is_no_wrong_clock() -> None:
    slow = replace(GOOD, skew_s=6.0, skew_bound_s=6.0)
    assert {f.level for f in check_server(slow)} == {"ok"}
