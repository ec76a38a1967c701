"""`/inference/v1/generate`: token ids in, token ids out, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.broker.codec import unpack_u32
from headrace.broker.errors import JobFailed
from headrace.broker.messages.frames import TokenLogprob
from headrace.broker.messages.requests import Sampling
from tests.support.frontend.fakes import CARD, FILES, MODEL, Call, FakeIngress, FakeServed, end, frontend, post, row, say

URL = "/inference/v1/generate"
IDS = [40, 41, 42]
CHOICE_KEYS = {
    *("index", "logprobs", "finish_reason", "stop_reason"),
    *("token_ids", "routed_experts", "sampling_mask", "weight_versions"),
}
ANSWER_KEYS = {
    *("request_id", "output_mode", "model", "created", "choices", "usage", "prompt_logprobs", "prompt_token_ids"),
    *("prompt_token_id_logprobs", "mm_placeholders", "metrics", "kv_transfer_params", "ec_transfer_params"),
}
SCORED = TokenLogprob(7, b"a", -1.5, [(9, b"b", -0.5), (7, b"a", -1.5), (8, b"c", float("-inf"))])


def body(sampling: Any = None, **more: Any) -> dict[str, Any]:
    return {"token_ids": IDS, "sampling_params": sampling or {}, **more}


async def ask(ingress: FakeIngress, sampling: Any = None, **more: Any) -> Call:
    headers = more.pop("headers", {})
    return await post(frontend(ingress).app, body(sampling, **more), URL, headers=headers)


def two_rows(job: Any) -> Any:
    yield [row("Hel", ids=[5, 6], logprobs=[SCORED, SCORED])]
    yield [row("lo", ids=[7], logprobs=[SCORED], fin=end("stop", stop=256, prompt_tokens=3, cached_tokens=2, tail="!"))]


async def test_ids_go_to_the_engine_as_they_are_and_come_back_as_ids() -> None:
    ingress = FakeIngress(two_rows)
    answer = (await ask(ingress, {"max_tokens": 9, "temperature": 0})).json()
    (job,) = ingress.jobs
    assert unpack_u32(job.generation.token_ids) == IDS
    assert (job.generation.sampling.max_tokens, job.generation.sampling.temperature) == (9, 0)
    assert set(answer) == ANSWER_KEYS
    (choice,) = answer["choices"]
    assert set(choice) == CHOICE_KEYS
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == ([5, 6, 7], "stop", 256)
    assert (answer["output_mode"], answer["model"]) == ("tokens", MODEL)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]) == (3, 3, {"cached_tokens": 2})
    assert answer["prompt_token_ids"] is None


async def test_text_is_added_where_it_is_wanted() -> None:
    answer = (await ask(FakeIngress(two_rows), {"logprobs": 2}, output_mode="text")).json()
    (choice,) = answer["choices"]
    assert (answer["output_mode"], choice["text"], choice["token_ids"]) == ("text", "Hello!", [5, 6, 7])
    assert choice["logprobs"]["content"][0]["token"] == "a"


async def test_log_probabilities_name_token_ids_the_chosen_one_first() -> None:
    (choice,) = (await ask(FakeIngress(two_rows), {"logprobs": 3})).json()["choices"]
    scores = choice["logprobs"]["content"]
    assert len(scores) == 3
    assert {key: scores[0][key] for key in ("token_id", "logprob", "rank")} == {"token_id": 7, "logprob": -1.5, "rank": 2}
    assert scores[0]["top_logprobs"] == [
        {"token_id": 7, "logprob": -1.5, "rank": 2},
        {"token_id": 9, "logprob": -0.5, "rank": 1},
        {"token_id": 8, "logprob": -9999.0, "rank": 3},
    ]
    (choice,) = (await ask(FakeIngress(two_rows), {"logprobs": 0})).json()["choices"]
    assert [other["token_id"] for other in choice["logprobs"]["content"][0]["top_logprobs"]] == [7]


async def test_a_stream_says_the_same_in_pieces() -> None:
    options = {"include_usage": True}
    call = await ask(FakeIngress(two_rows), {"logprobs": 1}, stream=True, stream_options=options, return_token_ids=True)
    first, second, usage, done = call.events()
    assert first["prompt_token_ids"] == IDS
    assert "prompt_token_ids" not in second
    assert [event["choices"][0]["token_ids"] for event in (first, second)] == [[5, 6], [7]]
    assert [event["choices"][0]["finish_reason"] for event in (first, second)] == [None, "stop"]
    assert len(second["choices"][0]["logprobs"]["content"]) == 1
    assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], 3, "[DONE]")
    assert {event["request_id"] for event in (first, second, usage)} == {first["request_id"]}
    assert all("text" not in event["choices"][0] for event in (first, second))


async def test_usage_may_be_in_every_event() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    call = await ask(FakeIngress(two_rows), stream=True, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in call.events()[:-1]] == [2, 3, 3]


async def test_a_stream_that_fails_has_no_end() -> None:
    call = await ask(FakeIngress(lambda job: [[row("a")], JobFailed("engine gone")]), stream=True)
    assert "error" in call.events()[-1]


async def test_several_choices_are_kept_apart() -> None:
    answer = (await ask(FakeIngress(say("a", "b")), {"n": 2}, output_mode="text")).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "ab"), (1, "ab")]


async def test_what_is_left_out_is_vllms_default_and_not_the_models() -> None:
    ingress = FakeIngress(two_rows)
    defaults = {"temperature": 0.2, "top_p": 0.5, "top_k": 7, "repetition_penalty": 1.3}
    ingress.models.served[MODEL] = FakeServed(
        msgspec.structs.replace(CARD, default_sampling=defaults, default_max_tokens=77), FILES
    )
    await ask(ingress)
    assert ingress.jobs[0].generation.sampling == Sampling(max_tokens=77)


@pytest.mark.parametrize(
    ("given", "headers", "end_of_id"),
    [({"request_id": "r-1"}, {}, "r-1"), ({"request_id": "r-1"}, {"x-request-id": "h-1"}, "h-1"), ({}, {}, "")],
)
async def test_the_id_is_the_clients_own_if_it_has_one(given: Any, headers: Any, end_of_id: str) -> None:
    ingress = FakeIngress(two_rows)
    call = await ask(ingress, headers=headers, **given)
    assert call.json()["request_id"] == f"generate-tokens-{end_of_id or ingress.jobs[0].id}"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids[0]"),
        ({"token_ids": [99999]}, "token_ids"),
        ({"token_ids": "hello"}, "token_ids"),
        ({"token_ids": [1] * 600}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"min_tokens": 9, "max_tokens": 4}}, "sampling_params.min_tokens"),
        ({"sampling_params": {"stop_token_ids": [99999]}}, "sampling_params.stop_token_ids"),
        ({"sampling_params": {"structured_outputs": {}}}, "sampling_params.structured_outputs"),
        ({"sampling_params": {"n": 129}}, "sampling_params.n"),
        ({"sampling_params": {"logprobs": -1}}, "sampling_params.logprobs"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, "sampling_params.prompt_logprobs"),
        ({"sampling_params": {"spaces_between_special_tokens": False}}, "sampling_params.spaces_between_special_tokens"),
        ({"sampling_params": {"logprob_token_ids": [1]}}, "sampling_params.logprob_token_ids"),
        ({"sampling_params": {"trace_decode_token_ids": [1]}}, "sampling_params.trace_decode_token_ids"),
        ({"sampling_params": {"watermarking": True}}, "sampling_params.watermarking"),
        ({"sampling_params": {"skip_reading_prefix_cache": True}}, "sampling_params.skip_reading_prefix_cache"),
        ({"sampling_params": {"detokenize": False}, "output_mode": "text"}, "output_mode"),
        ({"sampling_params": {"detokenize": False, "stop": ["x"]}}, "sampling_params.stop"),
        ({"sampling_params": {"structured_outputs": {"regex": "a"}}, "reasoning_ended": True}, "reasoning_ended"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"content_parts": [{"type": "image_url"}]}, "content_parts"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"ec_transfer_params": {"a": 1}}, "ec_transfer_params"),
        ({"output_mode": "audio"}, "output_mode"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(change: dict[str, Any], param: str) -> None:
    ingress = FakeIngress()
    call = await post(frontend(ingress).app, body() | change, URL)
    assert (call.status, call.error["param"]) == (400, param)
    assert not ingress.jobs


async def test_sampling_parameters_are_needed() -> None:
    call = await post(frontend(FakeIngress()).app, {"token_ids": IDS}, URL)
    assert (call.status, call.error["code"], call.error["param"]) == (400, "missing_required_parameter", "sampling_params")


async def test_what_vllm_takes_and_needs_nothing_done_is_taken() -> None:
    sampling = {"detokenize": False, "watermarking": False, "output_kind": 2, "flat_logprobs": True, "stop": []}
    call = await ask(FakeIngress(two_rows), sampling, token_offsets=[[0, 1]], reasoning_ended=False, features=None)
    assert call.status == 200
