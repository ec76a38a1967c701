"""What we do inside vLLM's worker processes, with the NIXL connector's own records imitated as far as they are touched."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.workers.vllm import worker_extension
from headrace.workers.vllm.worker_extension import HandoverExtension

REQUEST = "r-1-0.0a1b2c3d-00ff00ff"
BASE = "r-1-0.0a1b2c3d"


class Connector:
    """The worker's side of a NIXL connector."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self._reqs_to_process: set[str] = set()
        self._reqs_to_send: dict[str, float] = {}
        self._recving_metadata: dict[str, Any] = {}
        self._remote_agents: dict[str, dict[Any, str]] = {"e": {(0, 0): "agent"}}
        self._failed_recv_reqs = SimpleNamespace(put=self.failed.append)
        self.nixl_wrapper = SimpleNamespace(send_notif=self.send_notif)
        self.sent: list[tuple[str, bytes]] = []
        self.gone = False
        self.shaking: list[Callable[[Any], None]] | None = None

    def send_notif(self, agent: str, *, notif_msg: bytes) -> None:
        if self.gone:
            raise RuntimeError("disconnected")
        self.sent.append((agent, notif_msg))

    def _ensure_handshake(self, engine: str, host: str, port: int, tp_size: int, *, pp_size: int) -> Any:
        assert (engine, host, port, tp_size, pp_size) == ("e", "127.0.0.1", 4711, 1, 1)
        return None if self.shaking is None else SimpleNamespace(add_done_callback=self.shaking.append)

    def receives(self, request: str, *blocks: int) -> None:
        remote = SimpleNamespace(engine_id="e", request_id="theirs-11111111", host="127.0.0.1", port=4711)
        groups: Any = (list(blocks),) if blocks else []
        self._recving_metadata[request] = SimpleNamespace(local_block_ids=groups, remote=remote, tp_size=1, pp_size=1)


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Connector:
    made = Connector()
    monkeypatch.setattr(worker_extension, "_connector_worker", lambda: made)
    return made


def test_the_lease_of_a_released_prefill_ends_now(connector: Connector) -> None:
    later = time.perf_counter() + 30
    connector._reqs_to_process = {REQUEST, "other.0a1b2c3d-00ff00ff"}
    connector._reqs_to_send = {REQUEST: later, "other.0a1b2c3d-00ff00ff": later}
    assert HandoverExtension().headrace_let_go(["r-1-0", "unknown"]) == []
    assert connector._reqs_to_send[REQUEST] <= time.perf_counter()
    assert connector._reqs_to_send["other.0a1b2c3d-00ff00ff"] == later


def test_a_prefill_that_vllm_has_not_told_of_yet_is_named(connector: Connector) -> None:
    connector._reqs_to_process = {REQUEST}
    assert HandoverExtension().headrace_let_go(["r-1-0"]) == ["r-1-0"]


def test_who_waits_for_blocks_is_told_and_the_other_side_tried(connector: Connector) -> None:
    connector.receives(REQUEST, 1, 2)
    connector.receives("aborted.0a1b2c3d-00ff00ff", 3)
    connector.receives("unstarted.0a1b2c3d-00ff00ff")
    asked = [BASE, "unstarted.0a1b2c3d"]
    assert HandoverExtension().headrace_receiving(asked) == [(BASE, True)]
    assert connector.sent == [("agent", b"HB:theirs-11111111")]
    connector.gone = True
    assert HandoverExtension().headrace_receiving(asked) == [(BASE, False)]


def test_only_requests_with_blocks_are_given_up(connector: Connector) -> None:
    """vLLM's scheduler knows no others, and ends the engine over a word of one that it does not know."""
    connector.receives(REQUEST, 1, 2)
    connector.receives("unstarted.0a1b2c3d-00ff00ff")
    assert HandoverExtension().headrace_give_up([BASE, "unstarted.0a1b2c3d", "unknown"]) == 1
    assert connector.failed == [REQUEST]


def test_an_aborted_request_without_blocks_is_declined_and_forgotten(connector: Connector) -> None:
    connector.receives(REQUEST, 1, 2)
    connector.receives("unstarted.0a1b2c3d-00ff00ff")
    assert HandoverExtension().headrace_decline_unstarted([BASE, "unstarted.0a1b2c3d"]) == 1
    assert list(connector._recving_metadata) == [REQUEST]
    assert connector.sent == [("agent", b"theirs-11111111:1")]


DECLINED = {
    "remote_engine_id": "e",
    "remote_request_id": "theirs-11111111",
    "remote_host": "127.0.0.1",
    "remote_port": 4711,
    "tp_size": 1,
}


def test_a_prefill_side_that_was_never_met_is_told_when_hands_are_shaken(connector: Connector) -> None:
    connector.shaking = []
    HandoverExtension().headrace_decline([DECLINED])
    assert connector.sent == []
    connector.shaking[0](None)
    assert connector.sent == [("agent", b"theirs-11111111:1")]


def test_a_prefill_side_that_is_gone_need_not_be_told(connector: Connector) -> None:
    connector.gone = True
    HandoverExtension().headrace_decline([DECLINED, DECLINED])
    assert connector.sent == []
