"""Dealings with other engines, with vLLM and its workers imitated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import pytest_asyncio

from headrace.broker.messages import Sampling
from headrace.workers.engine import DisaggStyle, Handover, Output, Role, Sequence
from headrace.workers.errors import TransferFailed, UnsupportedByEngine
from headrace.workers.vllm.transfer import kv_transfer as module
from headrace.workers.vllm.transfer.connector import ConnectorChoice
from headrace.workers.vllm.transfer.kv_transfer import Hits, VllmKvTransfer
from headrace.workers.vllm.transfer.remote_fetches import GRACE_S, STALL_S
from headrace.workers.vllm.transfer.transfer_params import ASK
from tests.unit.workers.vllm.transfer.test_transfer_params import GOOD, LENT

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


class Bench:
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
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(module, "POLL_S", 0.0)
    monkeypatch.setattr(module, "_LET_GO_PAUSE_S", 0.0)
    made = Bench(ConnectorChoice(mode="push", roles=ALL, lease_s=30.0))
    yield made
    await made.exchange.close()


def sequence(kind: Literal["prefill", "decode", "lend"] | None, params: Any = GOOD) -> Sequence:
    handed = None if kind is None else Handover(kind=kind, params=params if kind == "decode" else None)
    return Sequence(id="r-1-0", token_ids=[5] * 100, prompt_tokens=100, sampling=Sampling(max_tokens=8), handover=handed)


async def test_an_ordinary_sequence_keeps_its_id(bench: Bench) -> None:
    assert bench.exchange.admit(sequence(None)) == ("r-1-0", None)


async def test_both_sides_get_the_same_id_and_the_prefill_side_never_the_same_twice(bench: Bench) -> None:
    first, asked = bench.exchange.admit(sequence("prefill"))
    again, _ = bench.exchange.admit(sequence("prefill"))
    assert asked is not None
    assert asked["do_remote_decode"] is True
    assert first != again
    fetched, params = bench.exchange.admit(sequence("decode", GOOD | {"remote_request_id": f"{first}-00ff00ff"}))
    assert fetched == first
    assert params is not None
    assert params["do_remote_prefill"] is True


async def test_unreadable_parameters_are_a_failed_transfer(bench: Bench) -> None:
    with pytest.raises(TransferFailed, match="remote_host"):
        bench.exchange.admit(sequence("decode", {"remote_engine_id": "e", "remote_request_id": "r"}))


async def test_an_engine_without_a_connector_refuses_both_kinds_and_releases_nothing() -> None:
    bench = Bench(None)
    for kind in ("prefill", "decode"):
        with pytest.raises(UnsupportedByEngine, match=kind):
            bench.exchange.admit(sequence(kind))
    bench.exchange.release("r-1-0", None)
    await asyncio.sleep(0)
    assert bench.llm.calls == []
    assert bench.exchange.roles == {Role.AGGREGATED}
    assert bench.exchange.style is DisaggStyle.NONE


async def test_an_engine_that_may_only_send_refuses_to_fetch() -> None:
    bench = Bench(ConnectorChoice(mode="push", roles=ALL - {Role.DECODE}, lease_s=30.0))
    bench.exchange.admit(sequence("prefill"))
    with pytest.raises(UnsupportedByEngine, match="decode"):
        bench.exchange.admit(sequence("decode"))
    await bench.exchange.close()


async def test_only_what_was_in_the_local_cache_counts_as_cached(bench: Bench) -> None:
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
    reads = Bench(ConnectorChoice(mode="pull", roles=ALL, lease_s=30.0, reads=True))
    cannot = Bench(ConnectorChoice(mode="pull", roles=ALL, lease_s=30.0))
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
    bench = Bench(ConnectorChoice(mode="pull", roles=ALL, lease_s=30.0))
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


async def test_a_connector_that_pushes_lends_nothing(bench: Bench) -> None:
    with pytest.raises(UnsupportedByEngine, match="lends"):
        bench.exchange.admit(sequence("lend"))


async def test_a_release_on_the_prefill_side_is_repeated_for_what_vllm_has_not_told_its_workers_yet(bench: Bench) -> None:
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


async def test_a_release_on_the_decode_side_tells_the_prefill_side(bench: Bench) -> None:
    bench.exchange.release("r-1-0", {"remote_host": "x"})  # nobody to be told
    bench.exchange.release("r-1-0", GOOD)
    assert await bench.until("headrace_decline") == [[GOOD]]
    assert len(bench.llm.calls) == 1


async def test_a_release_that_fails_does_not_end_the_others(bench: Bench) -> None:
    del bench.llm.answers["headrace_decline"]
    bench.exchange.release("r-1-0", GOOD)
    await bench.until("headrace_decline")
    bench.exchange.release("r-2-0", None)
    assert await bench.until("headrace_let_go") == [["r-2-0"]]


async def test_a_prefill_that_was_aborted_a_moment_after_it_was_done_is_let_go(bench: Bench) -> None:
    request_id = bench.submit(sequence("prefill"))
    bench.exchange.aborted(request_id, sequence("prefill"))
    assert await bench.until("headrace_let_go") == [["r-1-0"]]


async def test_a_fetch_that_was_aborted_before_it_began_frees_the_prefill_side(bench: Bench) -> None:
    request_id = bench.submit(sequence("decode"))
    bench.exchange.aborted(request_id, sequence("decode"))
    told = await bench.until("headrace_decline_unstarted", 2)  # vLLM tells its workers of an abort a step later
    assert told == [[DECODE_ID], [DECODE_ID]]


async def test_an_abort_after_the_first_token_concerns_nobody_else(bench: Bench) -> None:
    request_id = bench.submit(sequence("decode"))
    bench.exchange.arrived(request_id)
    bench.exchange.aborted(request_id, sequence("decode"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert bench.llm.calls == []


async def test_a_stalled_fetch_is_reported_and_its_blocks_are_taken_back_later(bench: Bench) -> None:
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


async def test_a_prefill_side_that_one_rank_cannot_reach_is_gone(bench: Bench) -> None:
    bench.llm.answers["headrace_receiving"] = [[(DECODE_ID, True)], [(DECODE_ID, False)], [(DECODE_ID, True)]]
    bench.submit(sequence("decode"))
    async with asyncio.timeout(10):
        while not bench.stalls:
            await asyncio.sleep(0)
    assert "cannot be reached" in bench.stalls[0][1]


async def test_an_aborted_fetch_is_not_looked_at_because_that_renews_its_lease(bench: Bench) -> None:
    request_id = bench.submit(sequence("decode"))
    bench.exchange.aborted(request_id, sequence("decode"))
    other = sequence("decode", GOOD | {"remote_request_id": "r-2-0.ffffffff-00ff00ff"})
    bench.submit(other)
    await bench.until("headrace_receiving", 2)
    assert {tuple(asked) for asked in bench.llm.called("headrace_receiving")} == {("r-2-0.ffffffff",)}


async def test_a_failing_look_does_not_end_the_watch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
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
