"""Every engine process has a port of its own, that nobody takes before vLLM does."""

from __future__ import annotations

import socket

import pytest

from headrace.workers.errors import EngineStartFailed
from headrace.workers.vllm.transfer.side_channel import HOST, PORT, side_channel


def test_it_is_on_loopback_and_gone_from_the_environment_afterwards() -> None:
    environ: dict[str, str] = {}
    with side_channel(environ) as port:
        assert environ == {HOST: "127.0.0.1", PORT: str(port)}
    assert environ == {}


def test_it_is_where_other_machines_reach_this_one_unless_the_operator_says_otherwise() -> None:
    environ: dict[str, str] = {}
    with side_channel(environ, host="127.0.0.2") as port:
        assert environ == {HOST: "127.0.0.2", PORT: str(port)}
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.2", port))
    given = {HOST: "127.0.0.3"}
    with side_channel(given, host="127.0.0.2"):
        assert given[HOST] == "127.0.0.3"


def test_two_starts_at_once_have_different_ports() -> None:
    with side_channel({}) as one, side_channel({}) as two:
        assert one != two


def test_the_port_is_kept_from_others_but_not_from_vllm() -> None:
    zmq = pytest.importorskip("zmq")  # comes with vLLM
    with side_channel({}) as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
            listener.bind(f"tcp://127.0.0.1:{port}")  # as vLLM does


def test_ranks_take_ports_in_a_row() -> None:
    with side_channel({}, ranks=3) as port:
        for rank in range(3):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port + rank))


def test_what_the_operator_has_set_wins_and_stays() -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environ = {HOST: "localhost", PORT: str(port)}
    with side_channel(environ) as chosen:
        assert chosen == port
        assert environ[HOST] == "localhost"
    assert environ == {HOST: "localhost", PORT: str(port)}


def test_a_port_that_is_taken_stops_the_start_and_is_named() -> None:
    """In vLLM it would be a start that never ends."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineStartFailed, match=str(port)), side_channel({PORT: str(port)}):
            raise AssertionError("not reached")


def test_an_address_of_another_machine_stops_the_start() -> None:
    with pytest.raises(EngineStartFailed, match=r"192\.0\.2\.1"), side_channel({HOST: "192.0.2.1"}):
        raise AssertionError("not reached")
