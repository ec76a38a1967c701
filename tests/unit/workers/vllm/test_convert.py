"""What vLLM says becomes what the engine protocol promises. No vLLM needed: its records are imitated."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headrace.broker.messages.frames import TokenLogprob
from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import Fault, Handover, Output, Sequence
from headrace.workers.errors import EngineDead, EngineOverloaded, RequestInvalid
from headrace.workers.vllm.convert import CORE_GONE, CoreEngine, to_compute, to_output

EOS = frozenset({2, 7})


def sequence(
    *, logprobs: int | None = None, stop_token_ids: tuple[int, ...] = (), handover: Handover | None = None
) -> Sequence:
    sampling = Sampling(max_tokens=8, stop_token_ids=list(stop_token_ids))
    return Sequence(id="r-1-0", token_ids=[5, 6], prompt_tokens=2, sampling=sampling, logprobs=logprobs, handover=handover)


def result(
    ids: list[int],
    *,
    finish: str | None = None,
    stop: int | str | None = None,
    logprobs: Any = None,
    cached: int = 0,
    params: Any = None,
) -> Any:
    completion = SimpleNamespace(token_ids=ids, finish_reason=finish, stop_reason=stop, logprobs=logprobs)
    times = SimpleNamespace(queued_ts=1.0, scheduled_ts=1.5, first_token_ts=3.5)
    return SimpleNamespace(
        outputs=[completion], num_cached_tokens=cached, kv_transfer_params=params, metrics=times, prompt_logprobs=None
    )


def converted(asked: Sequence, given: Any, *, first: bool = False, hits: int | None = None) -> Output:
    return to_output(asked, given, first=first, eos=EOS, token_bytes=lambda token: b"<%d>" % token, local_hits=hits)


def test_a_delta_carries_its_ids() -> None:
    assert converted(sequence(), result([3, 4])) == Output("r-1-0", [3, 4])


def test_cached_tokens_come_with_the_first_output_only() -> None:
    assert converted(sequence(), result([3], cached=32), first=True).cached_tokens == 32
    assert converted(sequence(), result([3], cached=32)).cached_tokens is None


@pytest.mark.parametrize(
    ("theirs", "ours"), [("stop", "stop"), ("length", "length"), ("abort", "abort"), ("repetition", "stop")]
)
def test_finish_reasons_are_translated(theirs: str, ours: str) -> None:
    assert converted(sequence(), result([3], finish=theirs)).finish == ours


def test_an_engine_error_is_a_fault_that_may_be_tried_again() -> None:
    output = converted(sequence(), result([], finish="error"))
    assert output.finish is None
    assert isinstance(output.fault, Fault)
    assert output.fault.retriable


def test_ending_on_an_end_token_names_no_stop() -> None:
    assert converted(sequence(), result([2], finish="stop")).stop is None
    assert converted(sequence(), result([7], finish="stop", stop=7)).stop is None  # a second end token of the generation config


def test_ending_on_a_stop_token_names_it() -> None:
    assert converted(sequence(stop_token_ids=(9,)), result([9], finish="stop", stop=9)).stop == 9
    assert converted(sequence(stop_token_ids=(7,)), result([7], finish="stop", stop=7)).stop == 7  # asked for by the request


def entry(logprob: float, rank: int) -> Any:
    return SimpleNamespace(logprob=logprob, rank=rank, decoded_token=None)


def test_prompts_carry_ranks_and_nothing_for_their_first_token() -> None:
    positions = [None, {6: entry(-2.0, 9), 11: entry(-0.5, 1), 12: entry(-1.0, 2)}]
    given = result([3])
    given.prompt_logprobs = positions
    asked = Sequence(id="r-1-0", token_ids=[5, 6], prompt_tokens=2, sampling=Sampling(max_tokens=8), prompt_logprobs=1)
    output = converted(asked, given, first=True)
    assert output.prompt_logprobs == [None, TokenLogprob(6, b"<6>", -2.0, [(11, b"<11>", -0.5)], 9)]
    assert converted(asked, given).prompt_logprobs is None


def test_logprobs_carry_bytes_and_the_best_alternatives_first() -> None:
    position = {4: entry(-2.0, 3), 11: entry(-0.5, 1), 12: entry(-1.0, 2)}
    output = converted(sequence(logprobs=2), result([4], logprobs=[position]))
    assert output.logprobs == [TokenLogprob(4, b"<4>", -2.0, [(11, b"<11>", -0.5), (12, b"<12>", -1.0)])]


def test_no_alternatives_asked_none_given() -> None:
    output = converted(sequence(logprobs=0), result([4], logprobs=[{4: entry(-2.0, 3)}]))
    assert output.logprobs == [TokenLogprob(4, b"<4>", -2.0, [])]


PREFILL = Handover(kind="prefill")
DECODE = Handover(kind="decode", params={"remote_engine_id": "e"})


@pytest.mark.parametrize("theirs", ["length", "stop"])
def test_a_prefill_ends_with_what_the_decode_side_has_to_know(theirs: str) -> None:
    given = result([2], finish=theirs, params={"remote_block_ids": ([1, 2],)})
    output = converted(sequence(handover=PREFILL), given, first=True)
    assert (output.finish, output.fault, output.stop) == ("length", None, None)
    assert output.handover == {"remote_block_ids": [[1, 2]]}


@pytest.mark.parametrize(("theirs", "params"), [("length", None), ("error", None), ("error", {"a": 1})])
def test_a_prefill_with_nothing_to_offer_is_a_fault(theirs: str, params: Any) -> None:
    output = converted(sequence(handover=PREFILL), result([2], finish=theirs, params=params), first=True)
    assert output.finish is None
    assert output.handover is None
    assert output.fault is not None
    assert output.fault.retriable


def test_a_prefill_that_was_aborted_says_so() -> None:
    output = converted(sequence(handover=PREFILL), result([], finish="abort"), first=True)
    assert (output.finish, output.handover, output.fault) == ("abort", None, None)


def test_blocks_that_do_not_come_are_a_failed_transfer_and_no_end() -> None:
    output = converted(sequence(handover=DECODE), result([], finish="error"), first=True)
    assert output.finish is None
    assert output.fault is not None
    assert (output.fault.code, output.fault.retriable) == ("transfer_failed", True)


def test_an_error_after_the_first_token_is_none_of_the_transfer() -> None:
    output = converted(sequence(handover=DECODE), result([], finish="error"))
    assert output.fault is not None
    assert output.fault.code == "engine_error"


def test_fetched_tokens_do_not_count_as_cached() -> None:
    assert converted(sequence(handover=DECODE), result([3], cached=96), first=True, hits=32).cached_tokens == 32


def test_of_a_fetched_prompt_one_token_is_to_be_computed() -> None:
    assert to_compute(sequence()) == 2
    assert to_compute(sequence(handover=PREFILL)) == 2
    assert to_compute(sequence(handover=DECODE)) == 1


@pytest.mark.parametrize("handover", [PREFILL, DECODE])
def test_the_first_output_of_a_handover_says_where_the_time_went(handover: Handover) -> None:
    first = converted(sequence(handover=handover), result([3]), first=True)
    assert first.extra == {"queued_s": 0.5, "computed_s": 2.0}
    assert converted(sequence(handover=handover), result([3])).extra is None
    assert converted(sequence(), result([3]), first=True).extra is None


class EngineDeadError(Exception):
    """Stands for vLLM's error of the same name."""


class GracefulHTTPError(Exception):
    """Stands for vLLM's error of the same name."""


class VLLMClientError(ValueError):
    """Stands for vLLM's error of the same name."""


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a stand-in of vLLM's exceptions in the place of the package."""
    exceptions, dead = ModuleType("vllm.exceptions"), ModuleType("vllm.v1.engine.exceptions")
    exceptions.GracefulHTTPError = GracefulHTTPError  # type: ignore[attr-defined]
    exceptions.VLLMClientError = VLLMClientError  # type: ignore[attr-defined]
    dead.EngineDeadError = EngineDeadError  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.exceptions", exceptions)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.exceptions", dead)


class Core(CoreEngine):
    NAME = "core"


@pytest.mark.usefixtures("vllm")
async def test_an_error_that_means_death_declares_it() -> None:
    core = Core()
    assert isinstance(core._translate(EngineDeadError("core")), EngineDead)
    assert await asyncio.wait_for(core.died(), 1) == CORE_GONE


@pytest.mark.usefixtures("vllm")
async def test_a_full_engine_is_overloaded_and_other_errors_stay_what_they_are() -> None:
    core = Core()
    overloaded = core._translate(GracefulHTTPError("too many"))
    assert isinstance(overloaded, EngineOverloaded)
    assert "too many" in str(overloaded)
    assert isinstance(core._translate(VLLMClientError("too long")), RequestInvalid)
    other = OSError("disk")
    assert core._translate(other) is other
    await core.healthy()
