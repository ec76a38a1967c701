"""Client processes of the growth benchmark, and what they say of one nats-server."""

from __future__ import annotations

import pytest

from benchmarks.growth.broker_limits import Step, measure
from benchmarks.growth.clients import ClientFailed, running, shares, summed

CLIENT = {"failed": 0, "ttft_p50_ms": 1.0, "ttft_p99_ms": 2.0, "total_p50_ms": 3.0, "made_late": False, "errors": []}


def test_clients_share_all_streams() -> None:
    assert shares(64, 5) == [13, 13, 13, 13, 12]
    assert shares(2, 5) == [1, 1]


def test_rates_of_clients_add_up_and_the_busiest_is_named() -> None:
    one = {**CLIENT, "seconds": 2.0, "ok": 10, "chunks": 100, "cpu_s": 0.5}
    other = {**CLIENT, "seconds": 4.0, "ok": 40, "chunks": 400, "cpu_s": 3.0, "failed": 1}
    found = summed([one, other])
    assert (found["ok"], found["req_s"], found["chunks_s"], found["failed"]) == (50, 15.0, 150.0, 1)
    assert found["busiest_client"] == 0.75


def test_a_client_that_ended_is_a_failure_and_no_wait() -> None:
    with running([("raw_client", "publish", "{}")]) as [client], pytest.raises(ClientFailed):
        client.said(30.0)


@pytest.mark.parametrize("storage", ["memory", "file"])
def test_what_is_stored_pulled_and_acked_is_counted(storage: str) -> None:
    orders = (("store", {"subject": "s0.a"}), ("consume", {"consumer": "s0.c0"}))
    found = measure(Step("queue", 128, orders, "consume", storage, 1, (1, 0)), 0.3)
    assert found["messages_s"] > 0
    assert found["server_us_per_message"] >= 0
    assert found["ms_per_consumer"] > 0


def test_what_subscribers_get_is_counted_by_messages() -> None:
    orders = (("subscribe", {"subject": "a", "more_subscriptions": 10}), ("publish", {"subject": "a"}))
    found = measure(Step("core", 128, orders, "subscribe"), 0.3)
    published = measure(Step("core", 128, orders, "publish"), 0.3)
    assert found["messages_s"] > 0
    assert published["messages_s"] > 0
