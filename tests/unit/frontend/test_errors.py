"""Every way a request can go wrong has its status, its code and, where there is one, the parameter."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from headrace.broker import errors as broker
from headrace.broker.batches.record import InputInvalid
from headrace.broker.durable.errors import CarrierLost, JobRejected
from headrace.broker.prefill_client import PrefillFailed
from headrace.frontend.errors import Translated, translate
from headrace.jetstream.errors import NotConnected
from tests.support.frontend.fakes import CARD, FILES, MODEL, Call, FakeIngress, FakeServed, chat, frontend, post, row

BAD_PARAMETERS = [
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"min_p": -1}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -5}, "max_completion_tokens"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": 7}, "stop"),
    ({"seed": 2**64}, "seed"),
    ({"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a+"}, "response_format"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"metadata": {"a": "b" * 513}}, "metadata[...]"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"cache_salt": "a@b"}, "cache_salt"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"request_id": "a b"}, "request_id"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"truncation_side": "right"}, "truncation_side"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
    ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"timeout": 0}, "timeout"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"truncate_prompt_tokens": 100_000}, "truncate_prompt_tokens"),
]


@pytest.mark.parametrize(("change", "param"), BAD_PARAMETERS)
async def test_a_bad_parameter_is_a_400_that_names_it(change: dict[str, object], param: str) -> None:
    ingress = FakeIngress()
    call = await post(frontend(ingress).app, chat(**change))
    assert (call.status, call.error["param"]) == (400, param)
    assert call.error["type"] == "invalid_request_error"
    assert not ingress.jobs


SAID = [{"role": "user", "content": "x"}]
GENERATING = {
    "/v1/chat/completions": {"messages": SAID},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": SAID, "max_tokens": 4},
    "/tokenize": {"prompt": "x"},
}


@pytest.mark.parametrize(("path", "body"), GENERATING.items())
async def test_where_one_model_is_served_none_need_be_named(path: str, body: dict[str, object]) -> None:
    ingress = FakeIngress()
    gone = msgspec.structs.replace(CARD, model="gone", pool="g", aliases=[])
    ingress.models.served["gone"] = FakeServed(gone, FILES, workers=0)
    call = await post(frontend(ingress).app, body, path)
    assert call.status == 200, call.body
    assert [job.card.model for job in ingress.jobs] == ([] if path == "/tokenize" else [MODEL])


async def test_a_refusal_for_want_of_a_worker_is_a_503_that_names_the_model_parameter() -> None:
    refused = broker.JobRefused("model 'm' has no ready worker", reason="no_worker", retry_after_s=1.0)
    call = await post(frontend(FakeIngress(lambda job: [refused])).app, chat(stream=True))
    assert (call.status, call.error["code"], call.error["param"]) == (503, "no_worker", "model")
    assert call.headers["retry-after"] == "1"


async def test_a_body_that_is_no_object_is_a_400() -> None:
    assert (await post(frontend(FakeIngress()).app, b"[1]")).status == 400


async def test_a_declared_body_over_the_limit_is_refused_unread() -> None:
    call = Call(
        frontend(FakeIngress(), max_body_bytes=100).app, "/v1/chat/completions", b"x", headers={"content-length": "101"}
    )
    await call.run()
    assert (call.status, call.error["code"], call.received) == (413, "body_too_large", 0)
    assert call.headers["connection"] == "close"


async def test_an_undeclared_body_is_refused_when_it_passes_the_limit() -> None:
    call = Call(frontend(FakeIngress(), max_body_bytes=100).app, "/v1/chat/completions", parts=[b"x" * 60] * 10)
    await call.run()
    assert (call.status, call.received) == (413, 2)


@pytest.mark.parametrize("wanted", [{}, {"max_tokens": 513}])
async def test_a_prompt_over_the_context_says_so_in_openais_words(wanted: dict[str, int]) -> None:
    text = "x" * (600 if not wanted else 20)
    call = await post(frontend(FakeIngress()).app, chat(messages=[{"role": "user", "content": text}], **wanted))
    assert (call.status, call.error["code"], call.error["param"]) == (400, "context_length_exceeded", "messages")
    assert "maximum context length is 512 tokens" in call.error["message"]


REFUSALS = [
    (broker.NoWorker(), 503, "no_worker", True),
    (broker.Overloaded(reason="tenant_queue_full", retry_after_s=2.5), 429, "tenant_queue_full", True),
    (broker.BrokerUnavailable(), 503, "broker_unavailable", True),
    (broker.RequestTooLarge(), 413, "request_too_large", False),
    (NotConnected(), 503, "broker_unavailable", True),
]


@pytest.mark.parametrize(("error", "status", "code", "retry"), REFUSALS)
async def test_a_refused_submission_has_its_status(error: Exception, status: int, code: str, retry: bool) -> None:
    ingress = FakeIngress()
    ingress.refusal = error
    call = await post(frontend(ingress).app, chat(stream=True))
    assert (call.status, call.error["code"], "retry-after" in call.headers) == (status, code, retry)


ENDS = [
    (broker.DeadlineExceeded(), 504, "deadline_exceeded"),
    (broker.JobRefused(reason="shed", retry_after_s=4), 429, "shed"),
    (broker.JobRefused(reason="draining"), 503, "draining"),
    (broker.JobRefused(reason="no_eligible_worker", retry_after_s=5), 503, "no_eligible_worker"),
    (broker.JobRefused(reason="no_prefill_worker", retry_after_s=1), 503, "no_prefill_worker"),
    (broker.JobInvalid("logprobs too high", param="top_logprobs"), 400, "invalid_request"),
    (broker.JobFailed(), 502, "engine_error"),
    (broker.PoisonJob(), 500, "poison"),
    (broker.ResumeImpossible(), 502, "resume_impossible"),
    (broker.JobCancelled(), 503, "cancelled"),
    (RuntimeError("a secret"), 500, "internal_error"),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("error", "status", "code"), ENDS)
async def test_a_job_that_ends_before_its_first_token_has_a_real_status(
    error: Exception, status: int, code: str, stream: bool
) -> None:
    call = await post(frontend(FakeIngress(lambda job: [error])).app, chat(stream=stream))
    assert (call.status, call.error["code"], call.complete) == (status, code, True)
    assert "secret" not in call.error["message"]


@pytest.mark.parametrize(("error", "status", "code"), ENDS)
async def test_a_job_that_ends_in_mid_stream_ends_the_stream_with_an_error_and_no_finish(
    error: Exception, status: int, code: str
) -> None:
    call = await post(frontend(FakeIngress(lambda job: [[row("Hel")], error])).app, chat(stream=True))
    events = call.events()
    assert call.status == 200
    assert events[-1]["error"]["code"] == code
    assert "[DONE]" not in events
    assert all(e["choices"][0]["finish_reason"] is None for e in events[:-1])
    assert call.complete


async def test_an_answer_that_stops_without_an_end_is_an_error() -> None:
    call = await post(frontend(FakeIngress(lambda job: [[row("Hel")], []])).app, chat())
    assert (call.status, call.error["code"]) == (502, "incomplete")


async def test_a_hopeless_error_tells_the_openai_clients_not_to_retry() -> None:
    call = await post(frontend(FakeIngress(lambda job: [broker.PoisonJob()])).app, chat())
    assert call.headers["x-should-retry"] == "false"
    call = await post(frontend(FakeIngress(lambda job: [broker.JobFailed()])).app, chat())
    assert "x-should-retry" not in call.headers


async def test_a_model_without_a_template_says_so() -> None:
    ingress = FakeIngress()
    served = ingress.models.served[MODEL]
    served.files = {"tokenizer.json": served.files["tokenizer.json"]}
    call = await post(frontend(ingress).app, chat())
    assert (call.status, call.error["code"]) == (400, "no_chat_template")


@pytest.mark.parametrize(("kind", "path"), [("completion", "/v1/chat/completions"), ("chat", "/v1/completions")])
async def test_a_model_is_only_asked_for_what_it_serves(kind: str, path: str) -> None:
    ingress = FakeIngress()
    ingress.models.served[MODEL] = FakeServed(msgspec.structs.replace(CARD, kinds=[kind]), FILES)
    body = chat() if "chat" in path else {"model": MODEL, "prompt": "x"}
    call = await post(frontend(ingress).app, body, path)
    assert (call.status, call.error["code"], call.error["param"]) == (400, "wrong_kind", "model")


async def test_a_broken_tokenizer_is_a_500_that_names_the_model() -> None:
    ingress = FakeIngress()
    served = ingress.models.served[MODEL]
    served.files = {"tokenizer.json": b"{}"}
    call = await post(frontend(ingress).app, chat())
    assert (call.status, call.error["code"]) == (500, "model_unusable")
    assert MODEL in call.error["message"]


async def test_a_request_cut_by_shutdown_is_told_so() -> None:
    ingress = FakeIngress(lambda job: [[row("Hel")]])
    call = Call(frontend(ingress).app, "/v1/chat/completions", chat(stream=True))
    task = asyncio.create_task(call.run())
    await call.until(lambda: len(call.sent) > 1)
    task.cancel()
    await asyncio.wait([task])
    assert call.events()[-1]["error"]["code"] == "draining"
    assert ingress.answers[0].cancelled


# never leave a worker or a carrier, or the start of a process
INSIDE = {PrefillFailed, CarrierLost, InputInvalid, JobRejected, broker.CardKeyUnusable}


def _concrete(kind: type[Exception]) -> list[type[Exception]]:
    return [kind, *(sub for child in kind.__subclasses__() for sub in _concrete(child))]


@pytest.mark.parametrize("kind", [k for k in _concrete(broker.BrokerError) if not k.__subclasses__() and k not in INSIDE])
def test_every_broker_error_has_a_status_of_its_own(kind: type[Exception]) -> None:
    told = translate(kind("x"))
    assert isinstance(told, Translated)
    assert told.code != "internal_error"
