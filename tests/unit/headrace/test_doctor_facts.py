"""How answers of a NATS server become facts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.base.errors import CommandError
from headrace.doctor_facts import PeerFacts, consumer_facts, embedded_monitoring, read_monitoring, stream_facts


def test_a_replica_that_is_away_is_told_from_one_that_is_behind() -> None:
    info = {
        "config": {"name": "HR_REQ", "num_replicas": 3, "max_bytes": 10, "storage": "file"},
        "state": {"messages": 1, "bytes": 2},
        "cluster": {"leader": "n1", "replicas": [{"name": "n2", "current": True}, {"name": "n3", "offline": True, "lag": 4}]},
    }
    facts = stream_facts(info, ())
    assert facts.leader == "n1"
    assert facts.peers == (PeerFacts(name="n2", current=True), PeerFacts(name="n3", current=False, offline=True, lag=4))


def test_copies_are_counted_of_consumers_that_last_in_a_cluster() -> None:
    known = {"name": "c", "leader": "n1", "replicas": [{"name": "n2", "current": True}]}
    lasting = {"name": "W_a", "config": {"durable_name": "W_a"}}
    assert consumer_facts({**lasting, "cluster": known}).copies == 2
    assert consumer_facts({**lasting, "cluster": {"leader": "alone"}}).copies == 0
    assert consumer_facts({"name": "follow_x", "config": {}, "cluster": known}).copies == 0


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "file:///etc/hostname"])
def test_a_monitoring_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(CommandError, match=r"--monitoring") as raised:
        read_monitoring(url)
    assert url in str(raised.value)


def test_the_ports_file_of_a_server_that_is_gone_is_passed_over(tmp_path: Path) -> None:
    run = tmp_path / "nats" / "run"
    run.mkdir(parents=True)
    (run / f"nats-server_{2**22 + 1}.ports").write_text('{"monitoring": ["http://127.0.0.1:1"]}')
    assert embedded_monitoring(tmp_path) is None
    (run / f"nats-server_{os.getpid()}.ports").write_text('{"monitoring": ["http://127.0.0.1:2"]}')
    assert embedded_monitoring(tmp_path) == "http://127.0.0.1:2"
