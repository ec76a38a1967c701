"""What of a request reaches the job, and what a whole answer looks like."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from headrace.broker.blocks import block_chain
from headrace.broker.codec import unpack_u32, unpack_u64
from headrace.broker.messages.requests import Sampling
from headrace.frontend.generation import plan
from headrace.frontend.openai import chat as openai_chat
from tests.support.frontend.fakes import CARD, FILES, MODEL, FakeIngress, FakeServed, chat, end, frontend, post, row, say


async def job_of(path: str = "/v1/chat/completions", headers: dict[str, str] | None = None, **body: Any) -> Any:
    ingress = FakeIngress()
    call = await post(frontend(ingress).app, body, path, headers=headers)
    assert call.status == 200, call.body
    return ingress.jobs[0]


def text_of(ids: bytes) -> str:
    from tokenizers import Tokenizer

    return str(Tokenizer.from_buffer(FILES["tokenizer.json"]).decode(unpack_u32(ids), skip_special_tokens=False))


async def test_sampling_wishes_reach_the_job() -> None:
    wishes = {
        "temperature": 0.3,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "seed": 42,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [5],
        "allowed_token_ids": [1, 2],
        "bad_words": ["no"],
    }
    job = await job_of(**chat(max_completion_tokens=9, max_tokens=3, logit_bias={"7": -50}, **wishes))
    assert job.generation.sampling == Sampling(max_tokens=9, logit_bias={7: -50.0}, **wishes)
    assert job.max_tokens == 9


async def test_the_models_defaults_fill_what_the_request_left_out() -> None:
    ingress = FakeIngress()
    card = msgspec.structs.replace(CARD, default_sampling={"temperature": 0.6, "top_k": 20, "stop_token_ids": [9]})
    ingress.models.served[MODEL] = FakeServed(card, FILES)
    await post(frontend(ingress).app, chat(temperature=0, stop_token_ids=[5]))
    sampling = ingress.jobs[0].generation.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.stop_token_ids) == (0, 20, 1.0, [5, 9])


@pytest.mark.parametrize(("default", "wish", "expected"), [(None, None, None), (64, None, 64), (511, None, None), (64, 70, 70)])
async def test_max_tokens_is_the_wish_or_the_cards_default_or_what_fits(
    default: int | None, wish: int | None, expected: int | None
) -> None:
    ingress = FakeIngress()
    ingress.models.served[MODEL] = FakeServed(msgspec.structs.replace(CARD, default_max_tokens=default), FILES)
    await post(frontend(ingress).app, chat(max_tokens=wish))
    job = ingress.jobs[0]
    assert job.prompt_tokens == len(unpack_u32(job.generation.token_ids))
    assert job.max_tokens == job.generation.sampling.max_tokens == (expected or 512 - job.prompt_tokens)


async def test_the_chat_template_makes_the_prompt() -> None:
    job = await job_of(**chat(messages=[{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]))
    assert text_of(job.generation.token_ids) == "<system>be</s><user>hi</s><assistant>"


async def test_the_block_chain_covers_the_whole_blocks_and_the_salt() -> None:
    for salt in (None, "pepper"):
        job = await job_of(**chat(messages=[{"role": "user", "content": "x" * 40}], cache_salt=salt))
        assert unpack_u64(job.hashes) == block_chain(unpack_u32(job.generation.token_ids), 16, salt=salt)
        assert job.generation.cache_salt == salt


GUIDED = [
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
        {"json": {"type": "object"}},
    ),
    ({"response_format": {"type": "text"}}, None),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"guided_json": {"type": "string"}}, {"json": {"type": "string"}}),
    ({"guided_grammar": "root ::= x"}, {"grammar": "root ::= x"}),
    ({"structured_outputs": {"regex": "b"}}, {"regex": "b"}),
]


@pytest.mark.parametrize(("wish", "guided"), GUIDED)
async def test_every_way_to_guide_the_output_ends_in_one_place(wish: dict[str, Any], guided: dict[str, Any] | None) -> None:
    assert (await job_of(**chat(**wish))).generation.guided == guided


async def test_headers_and_tiers_choose_tenant_class_and_deadline() -> None:
    headers = {"x-headrace-tenant": "Team A", "x-request-timeout-s": "12.5"}
    job = await job_of(headers=headers, **chat(service_tier="priority", priority=-3, timeout=99))
    assert (job.request_class, job.priority, job.deadline_s) == ("hi", -3, 12.5)
    assert job.tenant.startswith("team-a-")
    plain = await job_of(**chat(timeout=1e9))
    assert (plain.request_class, plain.tenant, plain.deadline_s) == ("std", "_", 3600.0)


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf"])
async def test_a_timeout_header_that_is_no_duration_is_a_400(value: str) -> None:
    call = await post(frontend(FakeIngress()).app, chat(), headers={"x-request-timeout-s": value})
    assert (call.status, call.error["param"]) == (400, "x-request-timeout-s")


PROMPTS = [
    ("hi", ["hi"]),
    (["hi", "you"], ["hi", "you"]),
    ([1, 2, 3], [[1, 2, 3]]),
    ([[1, 2], [3]], [[1, 2], [3]]),
]


@pytest.mark.parametrize(("prompt", "expected"), PROMPTS)
async def test_a_prompt_may_be_text_ids_or_a_list_of_either(prompt: Any, expected: list[Any]) -> None:
    ingress = FakeIngress()
    call = await post(frontend(ingress).app, {"model": MODEL, "prompt": prompt}, "/v1/completions")
    assert call.status == 200
    jobs = sorted(ingress.jobs, key=lambda j: j.id) if len(expected) == 1 else ingress.jobs
    got = [
        text_of(j.generation.token_ids) if isinstance(expected[0], str) else unpack_u32(j.generation.token_ids) for j in jobs
    ]
    assert got == expected
    assert len({j.id for j in ingress.jobs}) == len(expected)


@pytest.mark.parametrize(
    ("prompt", "n"),
    [
        ([], None),
        (["a", 1], None),
        ([1, [2]], None),
        ("", None),
        ([[1], []], None),
        ([300], None),
        ([-1], None),
        (["a"] * 70, 2),
    ],
)
async def test_a_prompt_that_is_none_of_these_is_a_400(prompt: Any, n: int) -> None:
    ingress = FakeIngress()
    call = await post(frontend(ingress).app, {"model": MODEL, "prompt": prompt, "n": n}, "/v1/completions")
    assert call.status == 400
    assert call.error["param"] in ("prompt", "n")
    assert not ingress.jobs


@pytest.mark.parametrize("change", [{"best_of": 3}, {"suffix": "x"}, {"prompt_embeds": "x"}])
async def test_what_completions_do_not_do_is_refused_by_name(change: dict[str, Any]) -> None:
    call = await post(frontend(FakeIngress()).app, {"model": MODEL, "prompt": "x", **change}, "/v1/completions")
    assert (call.status, call.error["code"]) == (400, "unsupported_parameter")
    assert call.error["param"] == next(iter(change))


async def test_several_prompts_and_choices_keep_their_indexes_and_add_their_usage() -> None:
    def script(job: Any) -> Any:
        return [[row(f"{job.prompt_tokens}.{c}", choice=c, fin=end(cached_tokens=c + 1)) for c in range(2)]]

    body = {"model": MODEL, "prompt": ["a", "bb"], "n": 2}
    answer = Completion.model_validate((await post(frontend(FakeIngress(script)).app, body, "/v1/completions")).json())
    assert [(c.index, c.text) for c in answer.choices] == [(0, "1.0"), (1, "1.1"), (2, "2.0"), (3, "2.1")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2  # what each prompt's luckless choice found


async def test_one_failing_prompt_withdraws_the_others() -> None:
    ingress = FakeIngress(lambda job: [RuntimeError()] if job.prompt_tokens == 1 else [])
    call = await post(frontend(ingress).app, {"model": MODEL, "prompt": ["a", "bb"]}, "/v1/completions")
    assert call.status == 500
    assert all(a.cancelled for a in ingress.answers)


async def test_a_whole_answer_is_what_openai_would_send() -> None:
    call = await post(
        frontend(FakeIngress(say("Hel", "lo", reason="length", cached_tokens=3))).app, chat(n=2, return_token_ids=True)
    )
    answer = ChatCompletion.model_validate(call.json())
    assert [(c.index, c.message.role, c.message.content, c.finish_reason) for c in answer.choices] == [
        (i, "assistant", "Hello", "length") for i in range(2)
    ]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert call.json()["choices"][0]["token_ids"] == [65, 65]
    assert answer.model == MODEL


PROMPTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": ["a", "b"]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}


@pytest.mark.parametrize("path", PROMPTS)
async def test_a_request_enters_the_planning_step_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[object] = []

    def counted(*args: Any) -> plan.GenerationPlan:
        entered.append(args[0])
        return plan.plan_generation(*args)

    monkeypatch.setattr(openai_chat, "plan_generation", counted)
    await job_of(path, model=MODEL, **PROMPTS[path])
    assert len(entered) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["a" * 3000, "b" * 3000]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"bad_words": ["a" * 17_000]}, "bad_words"),
        ({"guided_regex": "a" * 17_000}, "guided_regex"),
        ({"structured_outputs": {"regex": "a" * 17_000}}, "structured_outputs.regex"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": "b" * 300_000}}}}, "response_format"),
        ({"vllm_xargs": {"junk": "A" * 70_000}}, "vllm_xargs"),
    ],
)
async def test_a_parameter_that_is_too_large_is_refused_by_its_name_before_anything_is_stored(
    fields: dict[str, Any], param: str
) -> None:
    ingress = FakeIngress()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
    call = await post(frontend(ingress).app, body, "/v1/chat/completions")
    assert (call.status, ingress.jobs) == (400, [])
    error = call.json()["error"]
    assert (error["param"], error["code"]) == (param, "parameter_too_large")
    assert error["message"].startswith(f"{param} has ")
