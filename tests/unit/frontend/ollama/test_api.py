"""Ollama's API over a fake ingress: what becomes of requests, and the lines and answers that come back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from headrace.broker.codec import unpack_u32
from headrace.broker.errors import JobFailed, NoWorker
from headrace.broker.messages.frames import Part, Row, TokenLogprob
from headrace.broker.models.cards import MediaSlot
from headrace.frontend.errors import BadRequest
from headrace.frontend.generation.sse import UsageCounter
from headrace.frontend.ollama.api import chat_of, chat_of_prompt
from headrace.frontend.ollama.schema import OllamaChatRequest, OllamaPromptRequest
from headrace.frontend.ollama.writers import AnswerRecord, ChatShape, OllamaLines, OllamaWriter
from tests.support.frontend.answer_parts import call, content, parts_row, said, say_parts, thought
from tests.support.frontend.fakes import (
    CARD,
    FILES,
    MODEL,
    TEMPLATE,
    Call,
    FakeIngress,
    FakeServed,
    end,
    frontend,
    get,
    post,
    row,
    say,
)

HI = [{"role": "user", "content": "hi"}]
COUNTS = {
    *("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration"),
    *("eval_count", "eval_duration", "done_reason"),
}


def lines(call: Call) -> list[Any]:
    return [json.loads(line) for line in call.body.decode().splitlines()]


async def chat(ingress: FakeIngress, **more: Any) -> Call:
    return await post(frontend(ingress).app, {"model": MODEL, "messages": HI, **more}, "/api/chat")


async def generate(ingress: FakeIngress, **more: Any) -> Call:
    return await post(frontend(ingress).app, {"model": MODEL, "prompt": "hi", **more}, "/api/generate")


# -- answers ---------------------------------------------------------------------------------------------------


async def test_a_chat_is_streamed_in_lines_unless_it_says_otherwise() -> None:
    call = await chat(FakeIngress(say("Hello", " world", prompt_tokens=5)))
    assert call.headers["content-type"] == "application/x-ndjson"
    *pieces, last = lines(call)
    assert [piece["message"]["content"] for piece in pieces] == ["Hello", " world"]
    assert all(not piece["done"] and not COUNTS & set(piece) for piece in pieces)
    assert last["done"] is True
    assert set(last) >= COUNTS
    assert (last["done_reason"], last["message"]["content"], last["eval_count"]) == ("stop", "", 2)
    assert last["prompt_eval_count"] > 0
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] >= 0
    assert {piece["model"] for piece in (*pieces, last)} == {MODEL}


async def test_a_chat_as_a_whole() -> None:
    call = await chat(FakeIngress(say("Hello", " world", reason="length")), stream=False)
    answer = call.json()
    assert call.headers["content-type"] == "application/json"
    assert (answer["message"], answer["done"], answer["done_reason"]) == (
        {"role": "assistant", "content": "Hello world"},
        True,
        "length",
    )
    assert set(answer) >= COUNTS


async def test_a_prompt_is_answered_with_a_response() -> None:
    call = await generate(FakeIngress())
    assert "".join(line["response"] for line in lines(call)) == "Hello world"
    whole = (await generate(FakeIngress(), stream=False)).json()
    assert (whole["response"], whole["done"]) == ("Hello world", True)
    assert "message" not in whole


TURN = ([thought("Hm.")], [content("Let me ")], [content("look.")], [call(0, '{"a":', name="f"), call(0, "1}")])


async def test_thinking_and_calls_have_their_own_fields_and_calls_come_whole() -> None:
    ingress = FakeIngress(say_parts(*TURN, reason="tool_calls"))
    ingress.models.served[MODEL] = FakeServed(msgspec.structs.replace(CARD, reasoning_parser="think", tool_parser="x"), FILES)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    *pieces, last = lines(await chat(ingress, tools=tools))
    messages = [piece["message"] for piece in pieces]
    assert [m.get("thinking") for m in messages] == ["Hm.", None, None, None]
    assert "".join(m["content"] for m in messages) == "Let me look."
    (called,) = messages[-1]["tool_calls"]
    assert called["function"] == {"index": 0, "name": "f", "arguments": {"a": 1}}
    assert last["done_reason"] == "stop"
    whole = (await chat(ingress, tools=tools, stream=False)).json()["message"]
    assert (whole["content"], whole["thinking"], whole["tool_calls"][0]["function"]["name"]) == ("Let me look.", "Hm.", "f")


def played(rows: list[Row]) -> tuple[str, str, list[Any]]:
    writer = OllamaLines(ChatShape("m"), AnswerRecord(UsageCounter([3], 1)))
    out = b"".join(writer.events([one]) for one in rows) + writer.closing()
    found = [json.loads(line)["message"] for line in out.splitlines()]
    calls = [one["function"] for message in found for one in message.get("tool_calls", ())]
    return "".join(m["content"] for m in found), "".join(m.get("thinking", "") for m in found), calls


@pytest.mark.deep
@settings(deadline=None, max_examples=50)
@given(said())
def test_lines_add_up_to_the_whole_answer(parts: list[list[Part]]) -> None:
    rows = [*(parts_row(one) for one in parts), parts_row([], fin=end("stop"), ids=0)]
    writer = OllamaWriter(ChatShape("m"), AnswerRecord(UsageCounter([3], 1)))
    writer.take(rows)
    whole = json.loads(writer.body())["message"]
    calls = [one["function"] for one in whole.get("tool_calls", ())]
    assert played(rows) == (whole["content"], whole.get("thinking", ""), calls)


async def test_log_probabilities_come_with_the_text_they_belong_to() -> None:
    scored = TokenLogprob(7, b"a", -1.5, [(9, b"b", -0.5)])

    def script(job: Any) -> Any:
        yield [row("", ids=[7], logprobs=[scored])]  # held back
        yield [row("ab", ids=[7], logprobs=[scored], fin=end())]

    first, last = lines(await chat(FakeIngress(script), logprobs=True, top_logprobs=1))
    assert [score["token"] for score in first["logprobs"]] == ["a", "a"]
    assert first["logprobs"][0]["top_logprobs"][0]["logprob"] == -0.5
    assert "logprobs" not in last
    assert len((await chat(FakeIngress(script), logprobs=True, stream=False)).json()["logprobs"]) == 2


async def test_a_stream_that_breaks_ends_with_an_error_and_no_counts() -> None:
    ingress = FakeIngress(lambda job: [[row("a")], JobFailed("engine gone")])
    *_, last = lines(await chat(ingress))
    assert list(last) == ["error"]
    assert "engine gone" in last["error"]


async def test_no_line_is_anything_but_json_however_long_it_takes() -> None:
    ingress = FakeIngress(lambda job: [])
    call = Call(frontend(ingress, sse_keepalive_s=0.01).app, "/api/chat", {"model": MODEL, "messages": HI})
    task = asyncio.create_task(call.run())
    await call.until(lambda: bool(ingress.answers))
    ingress.answers[0].push([row("a")])
    await call.until(lambda: len(call.sent) > 1)
    await asyncio.sleep(0.05)
    ingress.answers[0].push([row("b", fin=end())])
    await task
    assert len(lines(call)) == 3


# -- requests --------------------------------------------------------------------------------------------------


async def test_options_become_sampling_parameters() -> None:
    ingress = FakeIngress()
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repeat_penalty": 1.2,
        "seed": 42,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "num_predict": 9,
        "stop": ["x"],
        "num_ctx": 4096,
        "num_gpu": 1,
        "mirostat": 0,
        "typical_p": 1.0,
        "repeat_last_n": 64,
    }
    assert (await chat(ingress, options=options, keep_alive="5m")).status == 200
    generation = ingress.jobs[0].generation
    sampling = generation.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.2, 0.3, 0.4)
    assert (sampling.seed, sampling.max_tokens, generation.stop) == (42, 9, ["x"])


@pytest.mark.parametrize(("predict", "most"), [(-1, None), (-2, None), (0, None), (100_000, None), (3, 3)])
async def test_num_predict_is_a_bound_and_never_an_error(predict: int, most: int | None) -> None:
    ingress = FakeIngress()
    assert (await chat(ingress, options={"num_predict": predict, "seed": -1})).status == 200
    job = ingress.jobs[0]
    assert job.max_tokens == (most or CARD.context_length - job.prompt_tokens)
    assert job.generation.sampling.seed is None


@pytest.mark.parametrize(
    ("given_format", "guided"),
    [("json", {"json_object": True}), ({"type": "object"}, {"json": {"type": "object"}}), ("", None), (None, None)],
)
async def test_format_constrains_the_answer(given_format: Any, guided: Any) -> None:
    ingress = FakeIngress()
    assert (await chat(ingress, format=given_format)).status == 200
    assert ingress.jobs[0].generation.guided == guided


async def test_a_prompt_goes_into_the_template_with_its_system_message_unless_it_is_raw() -> None:
    ingress = FakeIngress()
    await generate(ingress, system="S")
    await generate(ingress, raw=True, prompt="ab")
    ids = [unpack_u32(job.generation.token_ids) for job in ingress.jobs]
    assert len(ids[1]) == 2
    app = frontend(FakeIngress()).app
    messages = [{"role": "system", "content": "S"}, *HI]
    templated = (await post(app, {"model": MODEL, "messages": messages}, "/tokenize")).json()
    assert ids[0] == templated["tokens"]


async def test_an_answer_that_was_begun_is_continued() -> None:
    ingress = FakeIngress()
    await chat(ingress, messages=[*HI, {"role": "assistant", "content": "I am"}])
    app = frontend(FakeIngress()).app
    messages = [*HI, {"role": "assistant", "content": "I am"}]
    body = {"model": MODEL, "messages": messages, "continue_final_message": True}
    assert unpack_u32(ingress.jobs[0].generation.token_ids) == (await post(app, body, "/tokenize")).json()["tokens"]


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}:latest", "tiny", "tiny:latest"])
async def test_a_name_may_have_ollamas_tag_and_is_given_back(name: str) -> None:
    assert lines(await chat(FakeIngress(), model=name))[-1]["model"] == name


@pytest.mark.parametrize(("keep_alive", "reason"), [(None, "load"), (300, "load"), ("10m", "load"), (0, "unload")])
async def test_without_a_prompt_the_model_is_loaded_already(keep_alive: Any, reason: str) -> None:
    ingress = FakeIngress()
    for answer in (
        (await chat(ingress, messages=[], keep_alive=keep_alive)).json(),
        (await post(frontend(ingress).app, {"model": MODEL, "keep_alive": keep_alive}, "/api/generate")).json(),
    ):
        assert (answer["done"], answer["done_reason"]) == (True, reason)
    assert not ingress.jobs


# -- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "change", "named"),
    [
        ("/api/chat", {"options": {"temperature": 3}}, "options.temperature"),
        ("/api/chat", {"options": {"mirostat": 1}}, "options.mirostat"),
        ("/api/chat", {"options": {"typical_p": 0.5}}, "options.typical_p"),
        ("/api/chat", {"options": {"stop": ["a", ""]}}, "options.stop"),
        ("/api/chat", {"format": "xml"}, "format"),
        ("/api/chat", {"format": 3}, "format"),
        ("/api/chat", {"think": "a lot"}, "think"),
        ("/api/chat", {"top_logprobs": 3}, "top_logprobs"),
        ("/api/chat", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["!"]}]}, "messages[0]"),
        ("/api/chat", {"model": ""}, "model"),
        ("/api/generate", {"suffix": "x"}, "suffix"),
        ("/api/generate", {"template": "x"}, "template"),
        ("/api/generate", {"context": [1, 2]}, "context"),
        ("/api/generate", {"raw": True, "system": "x"}, "system"),
        ("/api/generate", {"raw": True, "images": ["aGk="]}, "images"),
        ("/api/embed", {"input": "x"}, "does not serve embedding"),
        ("/api/show", {"model": None}, "model"),
    ],
)
async def test_what_is_wrong_is_one_sentence_that_names_it(path: str, change: dict[str, Any], named: str) -> None:
    ingress = FakeIngress()
    call = await post(frontend(ingress).app, {"model": MODEL, "messages": HI, "prompt": "x"} | change, path)
    assert (call.status, list(call.json())) == (400, ["error"])
    assert named in call.json()["error"]
    assert not ingress.jobs


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"])
async def test_an_unknown_model_is_a_404(path: str) -> None:
    body = {"model": "org/other", "messages": HI, "prompt": "x", "input": "x"}
    call = await post(frontend(FakeIngress()).app, body, path)
    assert (call.status, list(call.json())) == (404, ["error"])
    assert MODEL in call.json()["error"]


@pytest.mark.parametrize("route", ["pull", "push", "create", "copy", "delete", "blobs/sha256:1", "nonsense"])
@pytest.mark.parametrize("method", ["POST", "DELETE", "HEAD"])
async def test_what_is_not_served_says_so_in_the_same_shape(route: str, method: str) -> None:
    call = await Call(frontend(FakeIngress()).app, f"/api/{route}", {}, method=method).run()
    assert (call.status, list(call.json())) == (404, ["error"])
    if route != "nonsense":
        assert "not served here" in call.json()["error"]


async def test_no_worker_and_a_wrong_method_too() -> None:
    ingress = FakeIngress()
    ingress.refusal = NoWorker("no worker")
    call = await chat(ingress)
    assert (call.status, list(call.json())) == (503, ["error"])
    assert "no worker" in call.json()["error"]
    call = await get(frontend(ingress).app, "/api/chat")
    assert (call.status, list(call.json())) == (405, ["error"])


def messages_of(*messages: dict[str, Any]) -> list[Any]:
    request = msgspec.convert({"model": "m", "messages": list(messages)}, OllamaChatRequest)
    return [dict(message) for message in chat_of(request, "m").messages]


def asking(*names: str) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": n, "arguments": {}}} for n in names]}


def test_results_belong_to_calls_by_name_and_else_in_their_order() -> None:
    one, two, three = (
        {"role": "tool", "content": text, "tool_name": name} for text, name in [("1", "b"), ("2", "a"), ("3", "a")]
    )
    _, calls, *results = messages_of({"role": "user", "content": "x"}, asking("a", "b", "a"), one, two, three)
    ids = [call["id"] for call in calls["tool_calls"]]
    assert len(set(ids)) == 3
    assert [result["tool_call_id"] for result in results] == [ids[1], ids[0], ids[2]]
    plain = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    _, calls, *results = messages_of({"role": "user", "content": "x"}, asking("a", "b"), *plain)
    assert [result["tool_call_id"] for result in results] == [call["id"] for call in calls["tool_calls"]]


def test_ids_that_are_given_are_kept() -> None:
    calls = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "a", "arguments": {"x": 1}}}]}
    _, asked, result = messages_of(
        {"role": "user", "content": "x"}, calls, {"role": "tool", "content": "", "tool_call_id": "c1"}
    )
    assert asked["tool_calls"] == [{"id": "c1", "type": "function", "function": {"name": "a", "arguments": {"x": 1}}}]
    assert result["tool_call_id"] == "c1"


def test_a_result_without_a_call_is_left_alone() -> None:
    (result,) = messages_of({"role": "tool", "content": "x"})
    assert result == {"role": "tool", "content": "x"}


def test_images_come_before_the_text() -> None:
    (message,) = messages_of({"role": "user", "content": "what?", "images": ["aGk=", "data:image/png;base64,aGk="]})
    urls = [part["image_url"]["url"] for part in message["content"][:2]]
    assert urls == ["data:;base64,aGk=", "data:image/png;base64,aGk="]
    assert message["content"][2] == {"type": "text", "text": "what?"}


def test_thinking_goes_to_the_template_as_reasoning() -> None:
    _, message, _ = messages_of(
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "thinking": "t"},
        {"role": "user", "content": "c"},
    )
    assert message["reasoning_content"] == "t"


def test_think_is_a_switch_or_an_effort() -> None:
    def of(think: Any) -> tuple[Any, Any]:
        request = msgspec.convert({"model": "m", "prompt": "x", "think": think}, OllamaPromptRequest)
        chat = chat_of_prompt(request, "m")
        return chat.chat_template_kwargs, chat.reasoning_effort

    assert of(True) == ({"enable_thinking": True, "thinking": True}, None)
    assert of(False) == ({"enable_thinking": False, "thinking": False}, None)
    assert of("high") == (None, "high")
    assert of(None) == (None, None)


@pytest.mark.parametrize("kind", ["custom", "web_surf"])
def test_tools_that_are_no_functions_are_refused_by_name(kind: str) -> None:
    """A call of a freeform tool is text, which the objects of this API cannot hold."""
    tools = [{"function": {"name": "f"}}, {"type": kind, "custom": {"name": "patch"}}]
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools}
    with pytest.raises(BadRequest, match=f"'{kind}' is not supported here: function only") as caught:
        chat_of(msgspec.convert(asked, OllamaChatRequest), "m")
    assert (caught.value.param, caught.value.code) == ("tools[1].type", "unsupported_parameter")


async def test_what_has_a_worker_is_listed() -> None:
    ingress = FakeIngress()
    app = frontend(ingress).app
    entry, alias = (await get(app, "/api/tags")).json()["models"]
    assert (entry["name"], entry["model"], entry["modified_at"]) == (MODEL, MODEL, "2023-11-14T22:13:20Z")
    assert (alias["name"], alias["model"]) == ("tiny", "tiny")
    assert len(entry["digest"]) == 64
    assert entry["details"]["families"] == []
    loaded, _ = (await get(app, "/api/ps")).json()["models"]
    assert (loaded["name"], loaded["context_length"]) == (MODEL, 512)
    ingress.models.served[MODEL].workers = 0
    assert (await get(app, "/api/tags")).json() == {"models": []}


async def test_the_digest_changes_with_the_card() -> None:
    ingress = FakeIngress()
    app = frontend(ingress).app
    before = (await get(app, "/api/tags")).json()["models"][0]["digest"]
    ingress.models.served[MODEL] = FakeServed(msgspec.structs.replace(CARD, context_length=64), FILES)
    assert (await get(app, "/api/tags")).json()["models"][0]["digest"] != before


async def test_a_model_is_described_by_its_card() -> None:
    ingress = FakeIngress()
    card = msgspec.structs.replace(CARD, tool_parser="x", reasoning_parser="y", media={"image": MediaSlot("<i>", 5)})
    ingress.models.served[MODEL] = FakeServed(card, FILES)
    for body in ({"model": f"{MODEL}:latest"}, {"name": "tiny"}):
        shown = (await post(frontend(ingress).app, body, "/api/show")).json()
        assert shown["capabilities"] == ["completion", "tools", "thinking", "vision"]
        info = shown["model_info"]
        assert info[f"{info['general.architecture']}.context_length"] == 512
        assert shown["template"] == TEMPLATE


async def test_the_version_is_that_of_the_api() -> None:
    answer = (await get(frontend(FakeIngress()).app, "/api/version")).json()
    assert tuple(int(part) for part in answer["version"].split(".")) >= (0, 6, 4)
