"""Prefill and decode on two machines, with the simulator, and no variable exported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.jetstream.embedded_server import find_binary
from tests.support.nixl_peer import needs_nixl
from tests.support.two_machines import ADDRESSES, NATS, Machine, two_machines, until

pytestmark = [pytest.mark.deployment, needs_nixl, pytest.mark.timeout(180)]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    with two_machines(tmp_path) as both:
        yield both


def test_blocks_go_from_one_machine_to_the_other(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    one, other = machines
    store = str(tmp_path / "store")
    until("nats-server", one.start("nats", str(find_binary()), "-js", "-a", ADDRESSES[0], "-sd", store), "is ready")
    model = ("--engine", "sim", "--model", "sim", "--engine-arg", "block_size=16", "--nats", NATS)
    decode = ("worker", "--role", "decode", "--name", "d", "--prefill", "always", "--metrics-port", "9100", *model)
    prefill = ("worker", "--role", "prefill", "--name", "p", *model)
    until("decode", one.headrace("decode", *decode), "worker.ready")
    until("prefill", other.headrace("prefill", *prefill), "worker.ready")
    until("frontend", one.headrace("frontend", "frontend", "--port", "8000", "--nats", NATS), "frontend.listening")
    one.until_ready("http://127.0.0.1:8000/ready")
    body = {"model": "sim", "prompt": list(range(5, 165)), "max_tokens": 4, "temperature": 0}
    before = other.sent()
    for n in range(3):
        body["prompt"] = [n + 5, *body["prompt"][1:]]
        answer = one.ask("http://127.0.0.1:8000/v1/completions", body)
        assert answer["usage"]["completion_tokens"] == 4
    shown = one.metrics(9100)
    remote = {name: value for name, value in shown.items() if name.startswith("headrace_worker_prefills_total{")}
    assert sum(value for name, value in remote.items() if 'where="remote"' in name) == 3, remote
    assert shown["headrace_worker_handover_tokens_total"] >= 3 * 144
    assert other.sent() - before >= 3 * 9 * 16384, "the blocks went over the cable"
    assert not {name: value for name, value in shown.items() if name.startswith("headrace_worker_prefill_failures_total{")}
