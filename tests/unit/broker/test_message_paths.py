"""Sampled requests have the paths of their messages told, and an ingress keeps a bounded number of them."""

from __future__ import annotations

import json

import pytest

from headrace.broker import message_paths, metrics
from headrace.broker.message_paths import MOST_HOPS, MessagePaths, path_headers, request_of
from headrace.jetstream.ports import Message
from headrace.jetstream.subjects import Subjects

SAMPLED = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


def hop(message_id: str, *, second: int = 0) -> Message:
    event = {"type": "in", "ts": f"2026-01-02T03:04:{second:02}Z", "subj": "s"}
    told = {"server": {"name": "n"}, "request": {"header": {"Nats-Msg-Id": [message_id]}}, "events": [event]}
    return Message("hr.hops.i", json.dumps(told).encode(), "", None)


def test_only_messages_of_sampled_requests_ask_for_it() -> None:
    assert path_headers(Subjects("hr"), SAMPLED, "i1") == {"Nats-Trace-Dest": "hr.hops.i1"}
    assert path_headers(Subjects("hr"), {"traceparent": SAMPLED["traceparent"][:-1] + "0"}, "i1") == {}
    assert path_headers(Subjects("hr"), {}, "i1") == {}


@pytest.mark.parametrize("message_id", ["r.a-1.1", "r.a-1.3@77", "r.a-1.1@0a1b2c3d"])
def test_the_request_is_found_in_the_ids_of_all_its_messages(message_id: str) -> None:
    assert request_of(message_id) == "r.a-1"


def test_hops_are_given_once_in_the_order_of_their_times() -> None:
    paths = MessagePaths(lambda _request: True)
    for message, second in (("r.1@5", 9), ("other.1", 1), ("r.1", 3)):
        paths.on_hop(hop(message, second=second))
    assert [one.message for one in paths.take("r")] == ["r.1", "r.1@5"]
    assert paths.take("r") == []
    assert len(paths) == 1


def test_what_is_too_much_or_of_no_request_here_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_paths, "MOST_REQUESTS", 2)
    before = metrics.HOPS_DROPPED._value.get()
    paths = MessagePaths(lambda request: request != "foreign")
    paths.on_hop(hop("foreign.1"))
    for _ in range(MOST_HOPS + 1):
        paths.on_hop(hop("a.1"))
    for request in ("b", "c"):
        paths.on_hop(hop(f"{request}.1"))
    assert len(paths) == 2
    assert paths.take("a") == []
    assert metrics.HOPS_DROPPED._value.get() - before == 1 + 1 + MOST_HOPS


def test_what_is_no_hop_is_counted_as_malformed() -> None:
    before = metrics.MALFORMED.labels("hop")._value.get()
    MessagePaths(lambda _request: True).on_hop(Message("hr.hops.i", b"{", "", None))
    assert metrics.MALFORMED.labels("hop")._value.get() == before + 1
