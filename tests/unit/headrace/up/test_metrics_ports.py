"""Metrics ports of parts: counted up, or free ones that no other part of the deployment has."""

from __future__ import annotations

import pytest

from headrace.config.settings import load
from headrace.up.metrics_ports import assign_ports
from headrace.up.parts import make_parts


def test_ports_count_up_from_the_first() -> None:
    taken: set[int] = set()
    assert assign_ports(9100, 3, taken) == [9100, 9101, 9102]
    assert taken == {9100, 9101, 9102}


def test_without_a_port_each_part_has_a_free_one() -> None:
    assert len({0, *assign_ports(None, 2, set())}) == 3


def test_a_free_port_is_never_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    picks = iter([20_001, 20_001, 20_002, 20_002, 20_003])
    monkeypatch.setattr("headrace.up.metrics_ports.choose_port", lambda _host, _port: next(picks))
    taken = {20_001}
    assert assign_ports(0, 2, taken) == [20_002, 20_003]
    assert taken == {20_001, 20_002, 20_003}


def test_parts_of_one_deployment_tell_different_free_ports() -> None:
    flags = {"worker.metrics_port": "0", "router.metrics_port": "0", "up.workers": "2", "up.routers": "2"}
    parts = make_parts(load("up", flags={**flags, "worker.engine": "sim"}), {}, port=1)
    told = [part.describe()["metrics_port"] for part in (*parts.workers, *parts.routers)]
    given = [part.env["HEADRACE_WORKER_METRICS_PORT"] for part in parts.workers]
    given += [part.env["HEADRACE_ROUTER_METRICS_PORT"] for part in parts.routers]
    assert [str(port) for port in told] == given
    assert len(set(told)) == 4
    assert 0 not in told
