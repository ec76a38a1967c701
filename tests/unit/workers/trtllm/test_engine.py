"""The adapter for TensorRT-LLM, end to end, on the stand-in for the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import EngineConfig, Handover
from headrace.workers.errors import EngineStartFailed, RequestInvalid, UnsupportedByEngine
from headrace.workers.trtllm.engine import TrtllmEngine
from tests.support import tensorrt_llm_stand_in as stand_in
from tests.unit.workers.trtllm.engine_bench import running, sequence, versions


class Thumb:
    """A logits processor that leaves one token."""

    def __call__(self, req_id: int, logits: Any, token_ids: Any, stream_ptr: Any, client_id: Any) -> None:
        logits[:] = -100.0
        logits[..., 77] = 100.0


# -- answers ---------------------------------------------------------------------------------------------------


@versions
@pytest.mark.parametrize("leaves_end_out", [False, True])
async def test_an_answer_that_ends_by_itself_ends_with_the_end_token(version: str, leaves_end_out: bool) -> None:
    options = {"mean_output_tokens": 4, "leaves_end_out": leaves_end_out}
    async with running(version=version, options=options) as bench:
        await bench.run(sequence("a", max_tokens=500, logprobs=0))
        assert (bench.last("a").finish, bench.last("a").stop, bench.ids("a")[-1]) == ("stop", None, 2)
        assert bench.ids("a").count(2) == 1
        assert len(bench.last("a").logprobs or ()) == len(bench.last("a").ids)


async def test_biases_and_named_logits_processors_change_the_tokens() -> None:
    processors = {"thumb": f"{__name__}:Thumb"}
    async with running(logits_processors=processors) as bench:
        allowed = Sampling(max_tokens=5, temperature=0.0, allowed_token_ids=[500, 501])
        biased = Sampling(max_tokens=3, temperature=0.0, logit_bias={1234: 50.0})
        await bench.run(
            sequence("allowed", sampling=allowed),
            sequence("biased", sampling=biased),
            sequence("thumb", max_tokens=3, extra={"logits_processors": ["thumb"]}),
        )
        assert set(bench.ids("allowed")) <= {500, 501}
        assert bench.ids("biased") == [1234] * 3
        assert bench.ids("thumb") == [77] * 3
        with pytest.raises(RequestInvalid, match="no logits processor 'other'; it has: thumb"):
            await bench.engine.submit(sequence("x", extra={"logits_processors": ["other"]}))


async def test_the_logits_of_an_answer_come_with_its_end_when_they_are_asked_for() -> None:
    async with running() as bench:
        await bench.run(sequence("a", max_tokens=2, extra={"return_generation_logits": True}))
        logits = np.asarray((bench.last("a").extra or {})["generation_logits"])
        assert [int(one.argmax()) for one in logits] == bench.ids("a")


@versions
async def test_requests_that_cannot_work_are_refused_by_name(version: str) -> None:
    async with running(version=version) as bench:
        for one, error, told in (
            (sequence("x", [1] * 4096), RequestInvalid, "4096 tokens leave no room"),
            (sequence("x", adapter="fr"), RequestInvalid, "no adapter 'fr'; it has: none"),
            (sequence("x", prompt_logprobs=1), UnsupportedByEngine, "a prompt's own tokens"),
            (sequence("x", media=[{"kind": "image"}]), UnsupportedByEngine, "token ids only"),
            (sequence("x", guided={"lark": "x"}), RequestInvalid, "unknown kind of structured output 'lark'"),
            (sequence("x", sampling=Sampling(max_tokens=1, logit_bias={60000: 1.0})), RequestInvalid, "token 60000"),
            (sequence("x", sampling=Sampling(max_tokens=1, temperature=-1.0)), RequestInvalid, "temperature is -1.0"),
            (sequence("x", handover=Handover(kind="prefill")), UnsupportedByEngine, "without cache_transceiver_config"),
            (sequence("x", extra={"attention_dp_rank": 1}), UnsupportedByEngine, "without enable_attention_dp"),
        ):
            with pytest.raises(error, match=told):
                await bench.engine.submit(one)
        await bench.run(sequence("y", max_tokens=1))  # and it goes on


async def test_a_chosen_id_of_bad_words_leaves_the_end_token_to_the_engine() -> None:
    async with running() as bench:
        await bench.run(sequence("a", sampling=Sampling(max_tokens=3, temperature=0.0, bad_words=["no"])))
        assert len(bench.ids("a")) == 3


# -- failures --------------------------------------------------------------------------------------------------


@versions
async def test_a_request_that_fails_is_given_up_alone(version: str) -> None:
    async with running(version=version, options={"faults": {"fail_at_token": 3}}) as bench:
        await bench.run(sequence("a"), sequence("short", max_tokens=2))
        fault = bench.last("a").fault
        assert fault is not None
        assert (fault.code, fault.retriable, len(bench.ids("a"))) == ("engine_error", True, 3)
        assert bench.last("short").finish == "length"
        await bench.engine.healthy()


async def test_a_start_that_fails_says_why() -> None:
    for args, told in (
        ({"kv_cache_confg": {}}, "no setting 'kv_cache_confg'; close to it: kv_cache_config"),
        ({"model": "x"}, "give 'model' as --model"),
        ({"kv_cache_config": {"tokens_per_block": 33}}, "refuses its settings: tokens_per_block is 33"),
        ({"kv_cache_config": {"block_size": 32}}, "block_size: Extra inputs are not permitted"),
        ({"kv_cache_config": {"kv_events_config": {}}}, "give event_buffer_max_size"),
        ({"kv_cache_config": 5}, "kv_cache_config must be a map"),
        ({"cache_transceiver_config": {"backend": "PIGEON"}}, "backend is 'PIGEON'"),
        ({"guided_decoding_backend": "none"}, "could not start .*guided_decoding_backend is 'none'"),
        ({"tensor_parallel_size": 2, "enable_attention_dp": 1, "adapters": {"a": "/nowhere"}}, "'a' is no adapter"),
        ({"logits_processors": {"a": "no.such:Thing"}}, "'a' cannot be made of 'no.such:Thing'"),
    ):
        with pytest.raises(EngineStartFailed, match=told):
            async with running(**args):
                pass
    with pytest.raises(EngineStartFailed, match="out of memory"):
        async with running(options={"fails_to_start": "CUDA out of memory"}):
            pass


async def test_a_model_without_its_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with stand_in.installed(), pytest.raises(EngineStartFailed, match=r"cannot read .*config.json"):
        await TrtllmEngine().start(EngineConfig(model=str(tmp_path / "empty"), served_name="m"), lambda _: None)


async def test_where_the_package_is_not_installed_the_start_names_what_is_missing() -> None:
    with pytest.raises(EngineStartFailed) as caught:
        await TrtllmEngine().start(EngineConfig(model="m", served_name="m"), lambda _: None)
    assert "The Python package tensorrt_llm is not installed." in str(caught.value)
    assert "NVIDIA's package index" in str(caught.value)
