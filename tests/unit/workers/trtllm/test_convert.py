"""Prefill and decode on two engines, over the stand-in for TensorRT-LLM."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import DisaggStyle, Handover, Role
from headrace.workers.errors import EngineStartFailed, UnsupportedByEngine
from tests.unit.workers.trtllm.engine_bench import EngineBench, running, sequence, versions

HANDS_OVER: dict[str, Any] = {
    "cache_transceiver_config": {"backend": "UCX", "kv_transfer_timeout_ms": 5000},
    "disable_overlap_scheduler": True,
}


async def _prefilled(prefill: EngineBench, name: str, **options: Any) -> dict[str, Any]:
    await prefill.run(sequence(name, handover=Handover(kind="prefill"), max_tokens=1, **options))
    last = prefill.last(name)
    assert last.finish == "length", last
    assert last.handover is not None
    return dict(last.handover)


@versions
async def test_a_prompt_computed_on_one_engine_is_answered_by_another_with_the_same_text(version: str) -> None:
    async with (
        running(version=version, role=Role.PREFILL) as prefill,
        running(version=version, **HANDS_OVER) as decode,
    ):
        assert prefill.engine.capabilities.disagg is DisaggStyle.PARAMS
        assert prefill.engine.capabilities.roles == decode.engine.capabilities.roles
        assert prefill.info.lease_s == 60.0
        assert decode.info.lease_s == 5.0
        await decode.run(sequence("alone", list(range(900, 980)), max_tokens=6))
        params = await _prefilled(prefill, "j1", tokens=list(range(900, 980)))
        assert isinstance(params["opaque_state"], str)
        await decode.run(sequence("j1", list(range(900, 980)), max_tokens=6, handover=Handover(kind="decode", params=params)))
        assert decode.ids("j1") == decode.ids("alone")
        assert decode.last("j1").finish == "length"
        # the blocks were fetched: nobody can fetch them again
        await decode.run(sequence("j2", list(range(900, 980)), handover=Handover(kind="decode", params=params)))
        fault = decode.last("j2").fault
        assert fault is not None
        assert fault.code == "transfer_failed"


@versions
async def test_released_blocks_cannot_be_fetched(version: str) -> None:
    async with running(version=version, **HANDS_OVER) as bench:
        params = await _prefilled(bench, "j")
        await bench.engine.release("j", None)
        await bench.engine.release("j", None)  # nothing more
        await bench.run(sequence("d", handover=Handover(kind="decode", params=params)))
        fault = bench.last("d").fault
        assert fault is not None
        assert fault.code == "transfer_failed"


@pytest.mark.parametrize("broken", [None, {}, {"engine": "vllm"}, {"opaque_state": "?"}, {"first_gen_tokens": []}])
async def test_parameters_that_cannot_be_used_fail_as_a_transfer(broken: dict[str, Any] | None) -> None:
    async with running(**HANDS_OVER) as bench:
        params = await _prefilled(bench, "j")
        given = params | broken if broken else broken
        await bench.run(sequence("d", handover=Handover(kind="decode", params=given)))
        fault = bench.last("d").fault
        assert fault is not None
        assert (fault.code, fault.retriable) == ("transfer_failed", True)


@pytest.mark.parametrize(
    "options",
    [
        {"guided": {"regex": "[0-9]{4}"}, "max_tokens": 10},
        {"logprobs": 1, "max_tokens": 3},  # the context side was not asked for them
        {"sampling": Sampling(max_tokens=3, temperature=0.7, seed=4)},
        {"sampling": Sampling(max_tokens=3, temperature=0.0, min_tokens=2)},
    ],
)
async def test_a_request_whose_first_token_the_context_side_cannot_choose_is_computed_here(options: dict[str, Any]) -> None:
    async with running(**HANDS_OVER) as bench:
        await bench.run(sequence("alone", **options))
        params = await _prefilled(bench, "j")
        await bench.run(sequence("d", handover=Handover(kind="decode", params=params), **options))
        assert bench.ids("d") == bench.ids("alone")
        assert bench.last("d").finish == bench.last("alone").finish


@versions
async def test_the_log_probability_of_the_first_token_comes_from_where_it_was_sampled(version: str) -> None:
    async with running(version=version, **HANDS_OVER) as bench:
        assert bench.info.prefill_samples
        params = await _prefilled(bench, "j", logprobs=2)
        params["first_logprobs"][0][1] = -0.75
        await bench.run(sequence("d", logprobs=2, max_tokens=3, handover=Handover(kind="decode", params=params)))
        entries = [entry for output in bench.outputs("d") for entry in output.logprobs or ()]
        assert [entry.logprob for entry in entries] == [-0.75, -0.25, -0.25]
        assert [entry.id for entry in entries] == bench.ids("d")
        assert [len(entry.top) for entry in entries] == [2, 2, 2]


async def test_an_answer_that_is_over_with_the_first_token_needs_no_second_engine() -> None:
    async with running(**HANDS_OVER) as bench:
        params = await _prefilled(bench, "j")
        (token,) = params["first_gen_tokens"]
        stopping = Sampling(max_tokens=9, temperature=0.0, stop_token_ids=[token])
        handover = Handover(kind="decode", params=params)
        await bench.run(
            sequence("one", max_tokens=1, handover=handover), sequence("stop", sampling=stopping, handover=handover)
        )
        assert (bench.ids("one"), bench.last("one").finish) == ([token], "length")
        assert (bench.ids("stop"), bench.last("stop").finish, bench.last("stop").stop) == ([token], "stop", token)


async def test_roles_follow_from_the_settings() -> None:
    async with running(cache_transceiver_config={"backend": "NIXL"}) as bench:
        assert bench.engine.capabilities.roles == {Role.AGGREGATED, Role.DECODE}
        await bench.engine.set_role(Role.DECODE)
        with pytest.raises(UnsupportedByEngine, match="aggregated, decode, not prefill"):
            await bench.engine.set_role(Role.PREFILL)
        assert bench.info.handover == "trtllm/nixl/1.3/32"
    with pytest.raises(EngineStartFailed, match="can be aggregated, decode, not prefill"):
        async with running(role=Role.PREFILL, disable_overlap_scheduler=False):
            pass
    async with running() as bench:
        assert bench.engine.capabilities.disagg is DisaggStyle.NONE
