"""What SGLang is told of a hand-over."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import DisaggStyle, EngineConfig, Fault, Handover, Output, Role, Sequence
from headrace.workers.errors import EngineStartFailed, RequestInvalid
from headrace.workers.sglang import disagg_rendezvous as subject
from headrace.workers.sglang.disagg_rendezvous import LOCAL_HOST, METHOD, use_local_store


def config(role: Role, **args: object) -> EngineConfig:
    return EngineConfig(model="m", served_name="m", role=role, args=args)


def test_an_aggregated_engine_is_started_without_any_of_it() -> None:
    environ: dict[str, str] = {}
    with subject.rendezvous_args(config(Role.AGGREGATED), environ) as args:
        assert (args, environ) == ({}, {})
    assert subject.with_handovers(Role.AGGREGATED) == {}


def test_a_prefill_engine_has_a_bootstrap_server_on_a_free_port_of_the_loopback_address() -> None:
    environ: dict[str, str] = {}
    with subject.rendezvous_args(config(Role.PREFILL), environ) as one, subject.rendezvous_args(config(Role.PREFILL)) as two:
        assert (one["disaggregation_mode"], one["disaggregation_transfer_backend"]) == ("prefill", "nixl")
        assert one["disaggregation_bootstrap_port"] not in (0, two["disaggregation_bootstrap_port"])
        assert one["host"] == environ["SGLANG_HOST_IP"] == "127.0.0.1"


def test_a_decode_engine_keeps_a_prefix_cache() -> None:
    with subject.rendezvous_args(config(Role.DECODE), {"SGLANG_HOST_IP": "127.0.0.2"}) as args:
        assert args["disaggregation_decode_enable_radix_cache"] is True
        assert args["host"] == "127.0.0.2"


def test_a_port_that_is_taken_stops_the_start_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(EngineStartFailed, match=f"disaggregation_bootstrap_port={port}"),
            subject.rendezvous_args(config(Role.PREFILL, disaggregation_bootstrap_port=port), {}),
        ):
            pass


def test_other_roles_are_refused() -> None:
    with pytest.raises(EngineStartFailed, match="encode"), subject.rendezvous_args(config(Role.ENCODE), {}):
        pass


def test_an_engine_serves_the_role_it_was_started_for() -> None:
    fields = subject.with_handovers(Role.DECODE)
    assert fields == {"roles": frozenset({Role.DECODE}), "disagg": DisaggStyle.RENDEZVOUS}


def test_the_word_of_two_engines_differs_with_their_pages() -> None:
    def word(page_size: int) -> str:
        return subject.handover_word("0.5", backend="nixl", dtype="float32", page_size=page_size, model=(30, 3, 64))

    assert word(16) == word(16) != word(32)
    assert word(16).startswith("sglang/nixl/0.5/float32/16/")


def test_only_a_prefill_engine_has_an_address() -> None:
    assert subject.bootstrap_address(Role.PREFILL, "10.0.0.1", 8998) == "10.0.0.1:8998"
    assert subject.bootstrap_address(Role.PREFILL, "::1", 8998) == "[::1]:8998"
    assert subject.bootstrap_address(Role.DECODE, "10.0.0.1", 8998) == ""


def test_both_sides_meet_at_the_prefill_engine() -> None:
    prefill = subject.bootstrap_fields(Handover(kind="prefill", room=7), role=Role.PREFILL, address="10.0.0.1:8998")
    peer = Handover(kind="decode", room=7, peer="10.0.0.1:8998")
    decode = subject.bootstrap_fields(peer, role=Role.DECODE, address="")
    assert prefill == decode == {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}


def test_a_prompt_without_a_rendezvous_is_computed_where_it_is() -> None:
    assert subject.bootstrap_fields(None, role=Role.DECODE, address="")["bootstrap_host"] == LOCAL_HOST
    assert subject.bootstrap_fields(None, role=Role.PREFILL, address="a:1")["bootstrap_host"] != LOCAL_HOST
    assert subject.bootstrap_fields(None, role=Role.AGGREGATED, address="") == {}


@pytest.mark.parametrize(
    ("handover", "role", "message"),
    [
        (Handover(kind="decode", room=7, peer="a:1"), Role.AGGREGATED, "takes no hand-overs"),
        (Handover(kind="decode", room=7, peer="a:1"), Role.PREFILL, "takes no decode hand-overs"),
        (Handover(kind="decode", room=0, peer="a:1"), Role.DECODE, "needs a room, not 0"),
        (Handover(kind="decode", params={}), Role.DECODE, "needs a room, not None"),
        (Handover(kind="decode", room=7), Role.DECODE, "host:port, not ''"),
        (Handover(kind="decode", room=7, peer="a:b"), Role.DECODE, "host:port, not 'a:b'"),
    ],
)
def test_a_wrong_hand_over_is_refused(handover: Handover, role: Role, message: str) -> None:
    with pytest.raises(RequestInvalid, match=message):
        subject.bootstrap_fields(handover, role=role, address="a:1")


@pytest.mark.parametrize(
    ("handover", "first", "code"),
    [
        (Handover(kind="decode", room=7, peer="a:1"), True, "transfer_failed"),
        (Handover(kind="decode", room=7, peer="a:1"), False, "engine_error"),
        (Handover(kind="prefill", room=7), True, "engine_error"),
        (None, True, "engine_error"),
    ],
)
def test_a_decode_side_that_fails_before_its_first_token_has_a_failed_transfer(
    handover: Handover | None, first: bool, code: str
) -> None:
    sequence = Sequence(id="s", token_ids=[1], prompt_tokens=1, sampling=Sampling(), handover=handover)
    output = Output("s", [], fault=Fault("engine_error", "lost", retriable=True))
    assert subject.as_transfer_failed(sequence, output, first=first).fault == Fault(code, "lost", retriable=True)


def test_the_role_is_that_of_the_started_engine() -> None:
    assert [subject.role_of(mode) for mode in ("prefill", "decode", "null", None)] == [
        Role.PREFILL,
        Role.DECODE,
        Role.AGGREGATED,
        Role.AGGREGATED,
    ]


def test_a_server_on_every_address_is_reached_at_the_one_that_is_set() -> None:
    assert subject.reachable_host("0.0.0.0", {"SGLANG_HOST_IP": "10.0.0.1"}) == "10.0.0.1"
    assert subject.reachable_host("10.0.0.2", {"SGLANG_HOST_IP": "10.0.0.1"}) == "10.0.0.2"


CHILD = "import sys; from pathlib import Path; file = Path(sys.argv[1]); file.write_text(file.read_text() + 'there')"


def test_they_meet_in_memory_that_children_of_the_process_read_and_write() -> None:
    environ: dict[str, str] = {}
    use_local_store({"tp_size": 2}, environ)
    path = environ[METHOD].removeprefix("file://")
    assert path.startswith(f"/proc/{os.getpid()}/fd/")
    try:
        for seen in ("there", "therethere"):
            subprocess.run([sys.executable, "-c", CHILD, path], check=True, timeout=30)
            assert os.pread(int(path.rpartition("/")[2]), 100, 0) == seen.encode()
        assert os.readlink(path).startswith("/memfd:"), "nothing of it lies on a disk"
    finally:
        os.close(int(path.rpartition("/")[2]))


@pytest.mark.parametrize(
    ("args", "environ"),
    [
        ({"nnodes": 2, "dist_init_addr": "10.0.0.1:5000"}, {}),
        ({"dist_init_addr": "127.0.0.1:5000"}, {}),
        ({"dp_size": 2}, {}),
        ({}, {METHOD: "env://"}),
    ],
)
def test_where_they_cannot_or_the_operator_has_named_a_place_it_stays(args: dict[str, Any], environ: dict[str, str]) -> None:
    before = dict(environ)
    use_local_store(args, environ)
    assert environ == before
