"""The roles of a chat's messages: those of OpenAI's API, and those that the model's template has besides."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from headrace.broker.codec import unpack_u32
from headrace.broker.jobs import Job
from headrace.broker.messages.frames import Row, TokenLogprob
from headrace.frontend.errors import BadRequest
from headrace.frontend.openai.chat import ROLES, named_roles
from headrace.frontend.prompts.templates import ChatTemplate
from tests.support.frontend.fakes import CARD, FILES, MODEL, Call, FakeIngress, FakeServed, Step, chat, end, frontend, post
from tests.unit.frontend.generation.test_plan import text_of
from tests.unit.workers.test_prompt_embeds import file, pickled

NONSENSE = [{"role": "user", "content": "hi"}, {"role": "nonsense", "content": "x"}]
PLAIN = ChatTemplate("{% for m in messages %}{{ m['role'] }}{% endfor %}", names={})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat(messages=NONSENSE)),
        ("/v1/chat/completions", chat(messages=NONSENSE, stream=True)),
        ("/tokenize", {"messages": NONSENSE}),
        ("/v1/chat/completions", chat(messages=NONSENSE, add_generation_prompt=False)),
    ],
)
async def test_a_word_that_is_no_role_is_refused_by_its_name(path: str, body: dict[str, Any]) -> None:
    ingress = FakeIngress()
    call = await post(frontend(ingress).app, body, path)
    assert (call.status, call.error["type"], call.error["param"]) == (400, "invalid_request_error", "messages[1].role")
    assert "'nonsense'" in call.error["message"]
    assert "system, developer, user, assistant, tool" in call.error["message"]
    assert ingress.jobs == []


async def test_each_api_refuses_it_in_its_own_shape() -> None:
    app = frontend(FakeIngress()).app
    call = await post(app, {"model": "m", "input": NONSENSE}, "/v1/responses")
    assert (call.status, call.error["param"]) == (400, "input[1].role")
    assert "'nonsense'" in call.error["message"]
    call = await post(app, {"model": "m", "max_tokens": 4, "messages": NONSENSE}, "/v1/messages")
    assert (call.status, call.json()["type"], call.error["type"]) == (400, "error", "invalid_request_error")
    assert "messages[1].role" in call.error["message"]
    assert "'nonsense'" in call.error["message"]
    call = await post(app, {"model": MODEL, "messages": NONSENSE, "stream": False}, "/api/chat")
    assert call.status == 400
    assert "'nonsense'" in call.json()["error"]


@pytest.mark.parametrize("role", ROLES)
def test_the_roles_of_the_api_are_taken_by_every_template(role: str) -> None:
    (message,) = named_roles([{"role": role, "content": "x"}], PLAIN)
    assert message["role"] == ("system" if role == "developer" else role)


def test_a_role_of_the_models_own_is_taken_where_its_template_names_it() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'context' %}{{ m.content }}{% endif %}{% endfor %}", names={}
    )
    assert named_roles([{"role": "context", "content": "x"}], template) == [{"role": "context", "content": "x"}]
    with pytest.raises(BadRequest, match="'context'"):
        named_roles([{"role": "context", "content": "x"}], PLAIN)


FAR = float("-inf")


def scored(text: str, value: float = -0.5, rank: int = 0) -> TokenLogprob:
    raw = text.encode()
    return TokenLogprob(raw[0], raw, value, [(99, b"c", -0.1), (raw[0], raw, value)], rank)


def script(job: Job) -> Iterable[Step]:
    """Says "xy" after the prompt "ab", one token at a time; choices take turns."""
    prompt = [None, scored("b", FAR, 7)] if job.generation.prompt_logprobs is not None else None
    for i, letter in enumerate("xy"):
        for c in range(job.choices):
            fin = end("length", prompt_logprobs=prompt) if i else None
            told = [scored(letter)] if job.generation.logprobs is not None else None
            yield [Row("job", 1, 7, c, i, [ord(letter)], [letter], told, fin)]


async def complete(ingress: FakeIngress | None = None, **body: Any) -> Call:
    ingress = ingress or FakeIngress(script)
    call = await post(frontend(ingress).app, {"model": MODEL, "prompt": "ab", **body}, "/v1/completions")
    assert call.status == 200, call.body
    return call


def events(call: Call) -> list[Any]:
    found = call.events()
    assert found.pop() == "[DONE]"
    return [e["choices"][0] for e in found]


async def test_an_echo_asks_for_the_prompts_log_probabilities_and_puts_them_first() -> None:
    ingress = FakeIngress(script)
    (choice,) = (await complete(ingress, echo=True, logprobs=1)).json()["choices"]
    assert ingress.jobs[0].generation.prompt_logprobs == 1
    assert choice["text"] == "abxy"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "x", "y"]
    assert logprobs["token_logprobs"] == [None, -9999.0, -0.5, -0.5]  # JSON has no infinity
    assert logprobs["top_logprobs"] == [None, {"c": -0.1, "b": -9999.0}, {"c": -0.1, "x": -0.5}, {"c": -0.1, "y": -0.5}]
    assert logprobs["text_offset"] == [0, 1, 2, 3]


async def test_a_streamed_echo_is_held_back_until_the_prompts_log_probabilities_are_known() -> None:
    ingress = FakeIngress(script)
    seen = events(await complete(ingress, echo=True, logprobs=1, stream=True, n=2, return_token_ids=True))
    for index in range(2):
        mine = [c for c in seen if c["index"] == index]
        assert [c["text"] for c in mine] == ["", "abxy", ""]
        assert mine[0]["prompt_token_ids"] == unpack_u32(ingress.jobs[0].generation.token_ids)
        assert mine[1]["logprobs"]["tokens"] == ["a", "b", "x", "y"]
        assert mine[1]["token_ids"] == [120, 121]
        assert mine[2]["finish_reason"] == "length"


async def test_without_log_probabilities_an_echo_is_streamed_at_once() -> None:
    assert [c["text"] for c in events(await complete(echo=True, stream=True))] == ["ab", "x", "y", ""]


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_the_prompt_alone_is_one_token_that_nobody_sees(logprobs: int | None) -> None:
    for stream in (False, True):
        ingress = FakeIngress(script)
        call = await complete(ingress, echo=True, max_tokens=0, logprobs=logprobs, stream=stream)
        assert ingress.jobs[0].max_tokens == 1
        choices = events(call) if stream else call.json()["choices"]
        assert "".join(c["text"] for c in choices) == "ab"
        assert [t for c in choices if c["logprobs"] for t in c["logprobs"]["tokens"]] == (["a", "b"] if logprobs == 0 else [])


async def test_prompt_log_probabilities_have_vllms_shape() -> None:
    (choice,) = (await complete(prompt_logprobs=2)).json()["choices"]
    second = {
        "98": {"logprob": -9999.0, "rank": 7, "decoded_token": "b"},
        "99": {"logprob": -0.1, "rank": 1, "decoded_token": "c"},
    }
    assert choice["prompt_logprobs"] == [None, second]
    answer = (await post(frontend(FakeIngress(script)).app, chat(prompt_logprobs=0))).json()
    assert answer["prompt_logprobs"] == [None, second]
    assert "prompt_logprobs" not in (await complete()).json()["choices"][0]


def embeds(rows: int) -> str:
    return base64.b64encode(file(pickled((rows, 2), (2, 1)), struct.pack("<6f", *range(6)))).decode()


async def test_embeddings_come_before_the_other_prompts() -> None:
    ingress = FakeIngress(script)
    ingress.models.served[MODEL] = FakeServed(msgspec.structs.replace(CARD, prompt_embeds=True), FILES)
    three = embeds(3)  # once: the file names the time at which it was written
    await complete(ingress, prompt_embeds=[three, embeds(2)])
    assert [job.prompt_tokens for job in ingress.jobs] == [3, 2, 2]
    first, _, last = (job.generation for job in ingress.jobs)
    assert (first.prompt_embeds, first.token_ids) == (base64.b64decode(three), b"")
    assert (last.prompt_embeds, text_of(last.token_ids)) == (None, "ab")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"prompt_embeds": "&"}, "prompt_embeds"),
        ({"prompt_embeds": embeds(2), "echo": True}, "echo"),
        ({"prompt_embeds": embeds(2), "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_embeds": embeds(3), "max_tokens": 513}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": None, "prompt_embeds": []}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
async def test_what_is_wrong_with_a_prompt_is_named(change: dict[str, Any], param: str) -> None:
    ingress = FakeIngress(script)
    ingress.models.served[MODEL] = FakeServed(msgspec.structs.replace(CARD, prompt_embeds=True), FILES)
    call = await post(frontend(ingress).app, {"model": MODEL, "prompt": "ab", **change}, "/v1/completions")
    assert (call.status, call.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("tier", "told", "request_class", "priority"),
    [
        (None, None, "std", 5),
        ("auto", "default", "std", 5),
        ("default", "default", "std", 5),
        ("flex", "flex", "batch", 5),
        ("priority", "priority", "hi", 5),
    ],
)
async def test_a_tier_is_a_class_and_a_priority(tier: str | None, told: str | None, request_class: str, priority: int) -> None:
    ingress = FakeIngress()
    call = await post(frontend(ingress).app, chat(service_tier=tier, priority=5))
    assert (ingress.jobs[0].request_class, ingress.jobs[0].priority) == (request_class, priority)
    assert call.json()["service_tier"] == told
    stream = await post(frontend(FakeIngress()).app, chat(service_tier=tier, stream=True))
    assert {e.get("service_tier") for e in stream.events()[:-1]} == {told}


async def test_the_bodys_request_id_becomes_part_of_the_answers() -> None:
    assert (await complete(request_id="mine")).json()["id"] == "cmpl-mine"


async def test_a_thinking_budget_is_handed_to_the_engine() -> None:
    for budget, extra in ((64, {"thinking_token_budget": 64}), (-1, {})):
        ingress = FakeIngress()
        await post(frontend(ingress).app, chat(thinking_token_budget=budget))
        assert ingress.jobs[0].generation.extra == extra


async def test_structural_tags_and_options_of_grammars_pass() -> None:
    for shape in ({"format": {"type": "any"}}, {"structures": [{"begin": "<a>", "end": "</a>"}], "triggers": ["<a"]}):
        ingress = FakeIngress()
        await post(frontend(ingress).app, chat(response_format={"type": "structural_tag", **shape}))
        guided = ingress.jobs[0].generation.guided
        assert guided is not None
        assert msgspec.json.decode(guided["structural_tag"]) == {"type": "structural_tag", **shape}
    ingress = FakeIngress()
    await post(frontend(ingress).app, chat(structured_outputs={"json": {}, "disable_any_whitespace": True}))
    assert ingress.jobs[0].generation.guided == {"json": {}, "disable_any_whitespace": True}
