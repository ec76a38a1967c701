"""Stored jobs: what they answer is what the HTTP route of the same body answers, but for the id and the time of the job."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.broker.codec import encode, pack_u32, unpack_u32
from headrace.broker.durable.errors import JobRejected
from headrace.broker.errors import BrokerUnavailable, Overloaded
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.requests import Envelope, Generation, Sampling
from headrace.frontend.job_renderer import ApiRenderer
from tests.support.frontend.fakes import MODEL, Call, FakeIngress, Script, chat, frontend, post, say
from tests.support.frontend.jobs import FAR, STORED, rendered, rows_of, run, stored
from tests.support.frontend.pooling import CLASSIFIER, EMBEDDER, SCORER, Bench

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"


class Desk:
    def __init__(self, script: Script | None = None, ingress: FakeIngress | None = None) -> None:
        self.ingress = ingress or FakeIngress(script)
        self.frontend = frontend(self.ingress)
        self.renderer: ApiRenderer = self.frontend.renderer

    async def answer(self, body: Any, endpoint: str = CHAT, **more: Any) -> Any:
        job = await rendered(self.renderer, stored(body, endpoint, **more))
        assert await run(self.ingress, job) == []
        response = job.response()
        assert response.status_code == 200
        return json.loads(bytes(response.body))

    async def ask(self, body: Any, endpoint: str = CHAT, **more: Any) -> Call:
        return await post(self.frontend.app, body, endpoint, **more)


def same(one: Any, other: Any) -> None:
    """Compare two answers, whose ids and times differ."""
    for answer in (one, other):
        for name in ("id", "created", "created_at", "completed_at"):
            answer.pop(name, None)
    for item in [*one.get("output", ()), *other.get("output", ())]:
        item.pop("id")
    assert one == other


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, chat()),
        (CHAT, chat(n=3, logprobs=True, top_logprobs=1)),
        (COMPLETIONS, {"model": MODEL, "prompt": "ab"}),
        (COMPLETIONS, {"model": MODEL, "prompt": ["ab", "cde"], "n": 2, "echo": True}),
        (RESPONSES, {"model": MODEL, "input": "hi"}),
        (MESSAGES, {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_a_job_answers_as_the_route_of_its_endpoint_does(endpoint: str, body: dict[str, Any]) -> None:
    desk = Desk()
    same(await desk.answer(body, endpoint), (await desk.ask(body, endpoint)).json())


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (EMBEDDINGS, {"model": EMBEDDER, "input": ["a", "bc", "def"]}),
        (EMBEDDINGS, {"model": EMBEDDER, "input": [5, 6], "encoding_format": "base64"}),
        ("/v1/score", {"model": SCORER, "text_1": "a", "text_2": ["b", "cd"]}),
        ("/v1/rerank", {"model": EMBEDDER, "query": "a", "documents": ["b", "cd"]}),
        ("/v1/classify", {"model": CLASSIFIER, "input": "ab"}),
    ],
)
async def test_a_job_of_a_pooling_route_answers_as_the_route_does(endpoint: str, body: dict[str, Any]) -> None:
    desk = Desk(ingress=Bench(job_inputs=2).ingress)
    same(await desk.answer(body, endpoint), (await desk.ask(body, endpoint)).json())


async def test_the_answer_is_named_and_dated_after_the_job_whatever_run_made_it() -> None:
    desk = Desk()
    job = stored(chat())
    bodies = set()
    for nonce in ("a" * 16, "b" * 16):
        answer = await rendered(desk.renderer, job, nonce)
        assert [request.id for request in answer.requests] == [f"{job.id}~{nonce}"]
        await run(desk.ingress, answer)
        bodies.add(bytes(answer.response().body))
    assert len(bodies) == 1
    (body,) = bodies
    assert json.loads(body)["id"] == f"chatcmpl-{job.id}"
    assert json.loads(body)["created"] == int(STORED)


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES])
async def test_a_plain_job_is_answered_as_a_whole_whatever_its_body_says_of_streaming(endpoint: str) -> None:
    desk = Desk()
    given = chat() if endpoint == CHAT else {"model": MODEL, "input": "hi"}
    streamed = {**given, "stream": True} | ({"stream_options": {"include_usage": True}} if endpoint == CHAT else {})
    same(await desk.answer(streamed, endpoint), (await desk.ask(given, endpoint)).json())


async def refused(body: Any, endpoint: str = CHAT, desk: Desk | None = None, **more: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(JobRejected) as caught:
        await rendered((desk or Desk()).renderer, stored(body, endpoint, **more))
    return caught.value.status, json.loads(caught.value.body)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, chat(temperature=9)),
        (CHAT, chat(model="nobody/knows")),
        (CHAT, {"model": MODEL}),
        (CHAT, b"{no json"),
        (CHAT, b'{"a":' * 90 + b"1" + b"}" * 90),
        (CHAT, chat(messages=[{"role": "user", "content": "x" * 600}])),
        (COMPLETIONS, {"model": MODEL, "prompt": [300]}),
        (EMBEDDINGS, {"model": MODEL, "input": "a"}),
        (MESSAGES, {"model": "nobody/knows", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}),
        (RESPONSES, {"model": MODEL, "input": "hi", "previous_response_id": "resp_none"}),
    ],
)
async def test_a_refused_body_has_the_status_and_the_error_of_its_route(endpoint: str, body: Any) -> None:
    desk = Desk()
    route = await desk.ask(body, endpoint)
    assert await refused(body, endpoint, desk) == (route.status, route.json())


async def test_an_endpoint_without_an_api_is_refused_by_name() -> None:
    status, error = await refused(chat(), "/v1/images")
    assert status == 400
    assert "'/v1/images'" in error["error"]["message"]


async def test_what_cannot_run_now_is_no_refusal_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    for error in (BrokerUnavailable("still reading"), Overloaded("full")):

        def fail(name: str, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(desk.ingress.models, "get", fail)
        with pytest.raises(type(error)):
            await rendered(desk.renderer, stored(chat()))


async def test_an_unexpected_error_of_an_api_is_a_refusal_without_details_and_no_endless_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk()

    def fail(name: str) -> Any:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(desk.ingress.models, "get", fail)
    status, error = await refused(chat(), desk=desk)
    assert status == 500
    assert "secret" not in json.dumps(error)


async def test_a_job_that_failed_has_the_error_that_an_http_client_would_get() -> None:
    desk = Desk()
    answer = await rendered(desk.renderer, stored(chat()))
    assert answer.fail(JobFault("invalid_request", "too much", param="logit_bias")) == []
    assert not answer.open
    assert answer.response().status_code == 400
    assert json.loads(bytes(answer.response().body))["error"]["param"] == "logit_bias"


# -- durable streams -------------------------------------------------------------------------------------------------


def data_of(events: list[bytes]) -> list[Any]:
    return [json.loads(event) for event in events]


async def streamed(desk: Desk, body: Any, endpoint: str) -> tuple[list[Any], Any]:
    answer = await rendered(desk.renderer, stored(body, endpoint, durable=True))
    events = await run(desk.ingress, answer)
    return data_of(events), json.loads(bytes(answer.response().body))


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, chat()),
        (CHAT, chat(n=2, logprobs=True, stream=True, stream_options={"include_usage": True})),
        (COMPLETIONS, {"model": MODEL, "prompt": "ab", "n": 2}),
        (COMPLETIONS, {"model": MODEL, "prompt": "ab", "echo": True, "logprobs": 1}),
    ],
)
async def test_a_durable_stream_has_the_events_of_the_route_and_the_whole_answer(endpoint: str, body: dict[str, Any]) -> None:
    desk = Desk()
    events, whole = await streamed(desk, body, endpoint)
    route = (await desk.ask({**body, "stream": True}, endpoint)).events()
    assert route.pop() == "[DONE]"
    for event in (*events, *route):
        event.pop("id"), event.pop("created")
    assert events == route
    plain = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    same(whole, (await desk.ask(plain, endpoint)).json())


async def test_the_same_rows_make_the_same_events_however_they_are_cut() -> None:
    desk = Desk(say("a", "bc", "", "d"))
    job = stored(chat(n=2), durable=True)
    one, other = await rendered(desk.renderer, job), await rendered(desk.renderer, job, "b" * 16)
    steps = await rows_of(desk.ingress, one)
    first = [event for rows in steps for event in one.take(rows)]
    assert first == [event for row in [row for rows in steps for row in rows] for event in other.take([row])]
    assert await one.finish() == await other.finish()


async def test_a_durable_stream_that_fails_ends_with_the_error_as_its_last_event() -> None:
    desk = Desk()
    answer = await rendered(desk.renderer, stored(chat(), durable=True))
    answer.take((await rows_of(desk.ingress, answer))[0])
    (event,) = answer.fail(JobFault("engine_error", "broken"))
    assert json.loads(event)["error"]["code"] == "engine_error"
    assert answer.response().status_code == 502


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (COMPLETIONS, {"model": MODEL, "prompt": ["a", "b"]}, "prompt"),
        (MESSAGES, {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}, "stream"),
    ],
)
async def test_what_cannot_be_a_durable_stream_is_refused(endpoint: str, body: Any, param: str) -> None:
    status, error = await refused(body, endpoint, durable=True)
    assert status == 400
    assert param in json.dumps(error)


# -- envelopes -------------------------------------------------------------------------------------------------------


def envelope(generation: Generation | None = None, **more: Any) -> Envelope:
    payload = encode(generation or Generation(token_ids=pack_u32([1, 2, 3]), sampling=Sampling(max_tokens=7)))
    fields = {"id": "x", "pool": "p", "model": MODEL, "judge": "", "deadline": 0.0, "created": 0.0}
    return Envelope(**{**fields, "tokens": 3, "payload": payload, **more})


async def test_an_envelope_is_submitted_as_it_is_and_answered_in_token_ids() -> None:
    desk = Desk()
    job = stored(b"", envelope=envelope(choices=2))
    answer = await rendered(desk.renderer, job)
    (request,) = answer.requests
    assert unpack_u32(request.generation.token_ids) == [1, 2, 3]
    assert (request.max_tokens, request.choices, request.deadline_s > 1e6) == (7, 2, FAR > STORED)
    await run(desk.ingress, answer)
    body = json.loads(bytes(answer.response().body))
    assert body["request_id"] == f"generate-tokens-{job.id}"
    assert [choice["token_ids"] for choice in body["choices"]] == [[65, 65], [65, 65]]
    assert body["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (envelope(kind="pool"), "kind"),
        (envelope(payload=b"\xc1"), "payload"),
        (envelope(Generation(token_ids=b"abc")), "token_ids"),
        (envelope(Generation(token_ids=pack_u32([999]))), "999"),
        (envelope(Generation(token_ids=pack_u32([1] * 600))), "512"),
        (envelope(choices=0), "choices"),
        (envelope(choices=999), "128"),
        (envelope(model="nobody/knows"), "nobody/knows"),
    ],
)
async def test_an_envelope_that_cannot_run_is_refused_by_what_is_wrong_with_it(given: Envelope, word: str) -> None:
    status, error = await refused(b"", envelope=given)
    assert status in (400, 404)
    assert word in error["error"]["message"]


async def test_the_tokens_of_a_job_are_counted_like_those_of_requests_once_its_result_was_seen() -> None:
    desk = Desk()
    job = await rendered(desk.renderer, stored(chat()))
    await run(desk.ingress, job)
    shown = desk.frontend.metrics.render().decode()
    assert 'source="job"' not in shown
    job.settled()
    shown = desk.frontend.metrics.render().decode()
    assert f'headrace_frontend_output_tokens_total{{model="{MODEL}",source="job"}} {job.tokens.completion:.1f}' in shown
    assert f'headrace_frontend_prompt_tokens_total{{model="{MODEL}",source="job"}} {job.tokens.prompt:.1f}' in shown
