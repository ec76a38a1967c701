"""Waiting for blocks of another engine has an end, and the memory they were to go into is taken back when that is safe."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import pytest_asyncio

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import DisaggStyle, Handover, Output, Role, Sequence
from headrace.workers.errors import EngineStartFailed, TransferFailed, UnsupportedByEngine
from headrace.workers.vllm import kv_transfer as module
from headrace.workers.vllm.kv_transfer import GRACE_S, HOST, PORT, STALL_S, Fetches, Hits, VllmKvTransfer, side_channel
from headrace.workers.vllm.transfer_connector import ASK, ConnectorChoice
from tests.unit.workers.vllm.test_transfer_params import GOOD, LENT

LEASE_S = 30.0


class Bench:
    def __init__(self) -> None:
        self.now = 1000.0
        self.fetches = Fetches(lease_s=LEASE_S, clock=lambda: self.now)

    def look(self, **receiving: bool) -> dict[str, str]:
        return self.fetches.look(receiving)


def test_a_fetch_without_progress_is_given_up() -> None:
    bench = Bench()
    bench.fetches.began("a")
    assert bench.look(a=True) == {}
    bench.now += STALL_S - 0.1
    assert bench.look(a=True) == {}
    bench.now += 0.1
    assert "no blocks came" in bench.look(a=True)["a"]


def test_a_prefill_side_that_is_gone_is_not_waited_for() -> None:
    bench = Bench()
    bench.fetches.began("a")
    bench.fetches.began("b")
    assert "cannot be reached" in bench.look(a=False, b=True)["a"]


def test_waiting_for_a_place_is_no_waiting_for_blocks() -> None:
    bench = Bench()
    bench.fetches.began("a")
    for _ in range(5):
        assert bench.look() == {}
        bench.now += STALL_S
    assert bench.look(a=True) == {}  # only now does its time begin
    bench.now += STALL_S - 0.1
    assert bench.look(a=True) == {}


def test_a_fetch_that_has_ended_is_forgotten() -> None:
    bench = Bench()
    bench.fetches.began("a")
    bench.look(a=True)
    bench.fetches.ended("a")
    bench.now += STALL_S
    assert bench.look(a=True) == {}
    assert not bench.fetches


def test_the_blocks_of_an_aborted_fetch_are_taken_back_when_the_lease_is_over() -> None:
    bench = Bench()
    bench.fetches.began("a")
    bench.fetches.aborted("a")
    assert bench.fetches
    assert not bench.fetches.waiting
    bench.now += LEASE_S + GRACE_S - 0.1
    assert bench.fetches.due() == []
    bench.now += 0.1
    assert bench.fetches.due() == ["a"]
    assert bench.fetches.due() == []
    assert not bench.fetches


def test_a_sequence_aborted_after_its_first_token_holds_nothing_back() -> None:
    bench = Bench()
    bench.fetches.began("a")
    bench.fetches.ended("a")
    bench.fetches.aborted("a")
    assert not bench.fetches


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


ALL = frozenset({Role.AGGREGATED, Role.PREFILL, Role.DECODE})
DECODE_ID = "r-1-0.0a1b2c3d"


class Llm:
    """Answers as the extension in vLLM's workers would; one rank."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.processed: list[Any] = []
        self.output_processor = SimpleNamespace(process_outputs=lambda outputs, *_: self.processed.append(outputs))
        self.answers: dict[str, list[Any]] = {
            "headrace_let_go": [[]],
            "headrace_receiving": [],
            "headrace_give_up": [1],
            "headrace_decline_unstarted": [0],
            "headrace_decline": [None],
        }

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((method, args[0] if args else None))
        return self.answers[method]

    def called(self, method: str) -> list[Any]:
        return [arg for name, arg in self.calls if name == method]


class KvTransferBench:
    def __init__(self, transfer: ConnectorChoice | None) -> None:
        self.llm = Llm()
        self.stalls: list[tuple[str, str]] = []
        self.exchange = VllmKvTransfer(self.llm, transfer, block_size=32, stalled=self.stalled)

    async def stalled(self, sequence_id: str, reason: str) -> None:
        self.stalls.append((sequence_id, reason))
        self.exchange.aborted(DECODE_ID, sequence("decode"))

    def submit(self, made: Sequence) -> str:
        request_id, _ = self.exchange.admit(made)
        self.exchange.began(request_id, made)
        return request_id

    async def until(self, method: str, times: int = 1) -> list[Any]:
        async with asyncio.timeout(10):
            while len(self.llm.called(method)) < times:
                await asyncio.sleep(0)
        return self.llm.called(method)


@pytest_asyncio.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KvTransferBench]:
    monkeypatch.setattr(module, "POLL_S", 0.0)
    monkeypatch.setattr(module, "_LET_GO_PAUSE_S", 0.0)
    made = KvTransferBench(ConnectorChoice(mode="push", roles=ALL, lease_s=30.0))
    yield made
    await made.exchange.close()


def sequence(kind: Literal["prefill", "decode", "lend"] | None, params: Any = GOOD) -> Sequence:
    handed = None if kind is None else Handover(kind=kind, params=params if kind == "decode" else None)
    return Sequence(id="r-1-0", token_ids=[5] * 100, prompt_tokens=100, sampling=Sampling(max_tokens=8), handover=handed)


async def test_an_ordinary_sequence_keeps_its_id(bench: KvTransferBench) -> None:
    assert bench.exchange.admit(sequence(None)) == ("r-1-0", None)


async def test_both_sides_get_the_same_id_and_the_prefill_side_never_the_same_twice(bench: KvTransferBench) -> None:
    first, asked = bench.exchange.admit(sequence("prefill"))
    again, _ = bench.exchange.admit(sequence("prefill"))
    assert asked is not None
    assert asked["do_remote_decode"] is True
    assert first != again
    fetched, params = bench.exchange.admit(sequence("decode", GOOD | {"remote_request_id": f"{first}-00ff00ff"}))
    assert fetched == first
    assert params is not None
    assert params["do_remote_prefill"] is True


async def test_unreadable_parameters_are_a_failed_transfer(bench: KvTransferBench) -> None:
    with pytest.raises(TransferFailed, match="remote_host"):
        bench.exchange.admit(sequence("decode", {"remote_engine_id": "e", "remote_request_id": "r"}))


async def test_an_engine_without_a_connector_refuses_both_kinds_and_releases_nothing() -> None:
    bench = KvTransferBench(None)
    for kind in ("prefill", "decode"):
        with pytest.raises(UnsupportedByEngine, match=kind):
            bench.exchange.admit(sequence(kind))
    bench.exchange.release("r-1-0", None)
    await asyncio.sleep(0)
    assert bench.llm.calls == []
    assert bench.exchange.roles == {Role.AGGREGATED}
    assert bench.exchange.style is DisaggStyle.NONE


async def test_an_engine_that_may_only_send_refuses_to_fetch() -> None:
    bench = KvTransferBench(ConnectorChoice(mode="push", roles=ALL - {Role.DECODE}, lease_s=30.0))
    bench.exchange.admit(sequence("prefill"))
    with pytest.raises(UnsupportedByEngine, match="decode"):
        bench.exchange.admit(sequence("decode"))
    await bench.exchange.close()


async def test_only_what_was_in_the_local_cache_counts_as_cached(bench: KvTransferBench) -> None:
    request_id = bench.submit(sequence("decode"))
    stats = SimpleNamespace(num_local_cached_tokens=64, num_external_cached_tokens=35)
    output = SimpleNamespace(request_id=f"{request_id}-12345678", prefill_stats=stats)
    later = SimpleNamespace(request_id=f"{request_id}-12345678", prefill_stats=None)
    bench.llm.output_processor.process_outputs([output, later])
    assert bench.llm.processed == [[output, later]]
    assert bench.exchange.arrived(request_id) == Hits(local=64, fetched=35)
    assert bench.exchange.arrived(request_id) is None


def borrowing() -> Sequence:
    return Sequence(
        id="r-1-0",
        token_ids=[5] * 100,
        prompt_tokens=100,
        sampling=Sampling(max_tokens=1),
        handover=Handover(kind="prefill", params=LENT),
    )


async def test_a_prefix_that_is_lent_is_asked_of_vllm_by_an_engine_that_reads() -> None:
    reads = KvTransferBench(ConnectorChoice(mode="pull", roles=ALL, lease_s=30.0, reads=True))
    cannot = KvTransferBench(ConnectorChoice(mode="pull", roles=ALL, lease_s=30.0))
    try:
        request_id, asked = reads.exchange.admit(borrowing())
        assert asked is not None
        assert asked["do_remote_decode"] is True
        assert asked["remote_block_ids"] == LENT["remote_block_ids"]
        assert cannot.exchange.admit(borrowing())[1] == dict(ASK)
        reads.exchange.began(request_id, borrowing())
        stats = SimpleNamespace(num_local_cached_tokens=32, num_external_cached_tokens=33)
        output = SimpleNamespace(request_id=f"{request_id}-12345678", prefill_stats=stats)
        reads.llm.output_processor.process_outputs([output])
        hits = reads.exchange.arrived(request_id)
        assert hits == Hits(local=32, fetched=33)
        told = Output("r-1-0", [1], finish="length", handover=GOOD, extra={"queued_s": 0.5})
        reads.exchange.finish(request_id, told, hits)
        assert told.extra == {"queued_s": 0.5, "remote_tokens": 33}
        assert told.handover == GOOD, "what was read is offered as if it had been computed"
    finally:
        await reads.exchange.close()
        await cannot.exchange.close()


async def test_what_is_lent_is_lent_for_less_than_vllm_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "perf_counter", lambda: 1000.0)
    bench = KvTransferBench(ConnectorChoice(mode="pull", roles=ALL, lease_s=30.0))
    try:
        request_id = bench.submit(sequence("lend"))
        monkeypatch.setattr(module.time, "perf_counter", lambda: 1003.0)  # computed, and kept from then on
        told = Output("r-1-0", [1], finish="length", handover=GOOD)
        bench.exchange.finish(request_id, told, bench.exchange.arrived(request_id))
        assert told.handover == GOOD | {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_blocks_expiry_time": 1030.0,
        }
        bench.exchange.release("r-1-0", None)
        assert await bench.until("headrace_let_go") == [["r-1-0"]]
    finally:
        await bench.exchange.close()


async def test_a_connector_that_pushes_lends_nothing(bench: KvTransferBench) -> None:
    with pytest.raises(UnsupportedByEngine, match="lends"):
        bench.exchange.admit(sequence("lend"))


async def test_a_release_on_the_prefill_side_is_repeated_for_what_vllm_has_not_told_its_workers_yet(
    bench: KvTransferBench,
) -> None:
    bench.llm.answers["headrace_let_go"] = [["r-1-0"], []]
    bench.exchange.release("r-1-0", None)
    bench.exchange.release("r-2-0", None)
    calls = await bench.until("headrace_let_go", 2)
    assert set(calls[0]) == {"r-1-0", "r-2-0"}
    assert calls[1] == ["r-1-0"]
    bench.llm.answers["headrace_let_go"] = [[]]
    done = len(bench.llm.called("headrace_let_go")) + 1
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(bench.llm.calls) <= done


async def test_a_release_on_the_decode_side_tells_the_prefill_side(bench: KvTransferBench) -> None:
    bench.exchange.release("r-1-0", {"remote_host": "x"})  # nobody to be told
    bench.exchange.release("r-1-0", GOOD)
    assert await bench.until("headrace_decline") == [[GOOD]]
    assert len(bench.llm.calls) == 1


async def test_a_release_that_fails_does_not_end_the_others(bench: KvTransferBench) -> None:
    del bench.llm.answers["headrace_decline"]
    bench.exchange.release("r-1-0", GOOD)
    await bench.until("headrace_decline")
    bench.exchange.release("r-2-0", None)
    assert await bench.until("headrace_let_go") == [["r-2-0"]]


async def test_a_prefill_that_was_aborted_a_moment_after_it_was_done_is_let_go(bench: KvTransferBench) -> None:
    request_id = bench.submit(sequence("prefill"))
    bench.exchange.aborted(request_id, sequence("prefill"))
    assert await bench.until("headrace_let_go") == [["r-1-0"]]


async def test_a_fetch_that_was_aborted_before_it_began_frees_the_prefill_side(bench: KvTransferBench) -> None:
    request_id = bench.submit(sequence("decode"))
    bench.exchange.aborted(request_id, sequence("decode"))
    told = await bench.until("headrace_decline_unstarted", 2)  # vLLM tells its workers of an abort a step later
    assert told == [[DECODE_ID], [DECODE_ID]]


async def test_an_abort_after_the_first_token_concerns_nobody_else(bench: KvTransferBench) -> None:
    request_id = bench.submit(sequence("decode"))
    bench.exchange.arrived(request_id)
    bench.exchange.aborted(request_id, sequence("decode"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert bench.llm.calls == []


async def test_a_stalled_fetch_is_reported_and_its_blocks_are_taken_back_later(bench: KvTransferBench) -> None:
    now = [0.0]
    bench.exchange._fetches._clock = lambda: now[0]
    bench.llm.answers["headrace_receiving"] = [[(DECODE_ID, True)]]
    bench.submit(sequence("decode"))
    assert await bench.until("headrace_receiving", 2) == [[DECODE_ID], [DECODE_ID]]
    assert bench.stalls == []
    now[0] = STALL_S
    async with asyncio.timeout(10):
        while not bench.stalls:
            await asyncio.sleep(0)
    assert bench.stalls[0][0] == "r-1-0"
    await bench.until("headrace_decline_unstarted", 2)
    assert bench.llm.called("headrace_give_up") == []
    now[0] += 30.0 + GRACE_S
    assert await bench.until("headrace_give_up") == [[DECODE_ID]]
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(bench.stalls) == 1
    assert len(bench.llm.called("headrace_give_up")) == 1


async def test_a_prefill_side_that_one_rank_cannot_reach_is_gone(bench: KvTransferBench) -> None:
    bench.llm.answers["headrace_receiving"] = [[(DECODE_ID, True)], [(DECODE_ID, False)], [(DECODE_ID, True)]]
    bench.submit(sequence("decode"))
    async with asyncio.timeout(10):
        while not bench.stalls:
            await asyncio.sleep(0)
    assert "cannot be reached" in bench.stalls[0][1]


async def test_an_aborted_fetch_is_not_looked_at_because_that_renews_its_lease(bench: KvTransferBench) -> None:
    request_id = bench.submit(sequence("decode"))
    bench.exchange.aborted(request_id, sequence("decode"))
    other = sequence("decode", GOOD | {"remote_request_id": "r-2-0.ffffffff-00ff00ff"})
    bench.submit(other)
    await bench.until("headrace_receiving", 2)
    assert {tuple(asked) for asked in bench.llm.called("headrace_receiving")} == {("r-2-0.ffffffff",)}


async def test_a_failing_look_does_not_end_the_watch(bench: KvTransferBench, monkeypatch: pytest.MonkeyPatch) -> None:
    answering = bench.llm.collective_rpc
    failed = []

    async def failing(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        failed.append(method)
        raise RuntimeError("busy")

    monkeypatch.setattr(bench.llm, "collective_rpc", failing)
    bench.submit(sequence("decode"))
    async with asyncio.timeout(10):
        while not failed:
            await asyncio.sleep(0)
    monkeypatch.setattr(bench.llm, "collective_rpc", answering)
    await bench.until("headrace_receiving")
