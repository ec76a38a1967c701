"""Tools and reasoning in chats: what reaches the template and the worker, and what parts look like to the client."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from headrace.broker.codec import unpack_u32
from headrace.broker.jobs import Job
from headrace.broker.messages import Finish, Part, Row, TokenLogprob
from headrace.broker.models.cards import ModelCard
from tests.support.frontend.fakes import CARD, FILES, MODEL, Call, FakeIngress, FakeServed, Step, chat, end, frontend, post
from tests.unit.frontend.generation.test_plan import text_of

TOOL_CARD = msgspec.structs.replace(CARD, tool_parser="hermes", context_length=4096)
THINKER = msgspec.structs.replace(TOOL_CARD, reasoning_parser="think")
TEMPLATE = "{{ tools | tojson if tools else '-' }}{% for m in messages %}<{{ m.role }}>{{ m | tojson }}{% endfor %}"

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
LARK = {
    "type": "custom",
    "custom": {"name": "patch", "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}},
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "what time it is", "strict": True}}


def serving(card: ModelCard = TOOL_CARD, script: Any = None) -> FakeIngress:
    ingress = FakeIngress(script)
    ingress.models.served[MODEL] = FakeServed(card, FILES | {"chat_template.jinja": TEMPLATE.encode()})
    return ingress


async def ask(card: ModelCard = TOOL_CARD, script: Any = None, **body: Any) -> tuple[Call, FakeIngress]:
    ingress = serving(card, script)
    return await post(frontend(ingress).app, chat(**body)), ingress


async def job_of(card: ModelCard = TOOL_CARD, **body: Any) -> Job:
    call, ingress = await ask(card, **body)
    assert call.status == 200, call.body
    return ingress.jobs[0]


def parts(*tokens: list[Part], logprobs: bool = False, **finish: Any) -> Any:
    """One row per token, each releasing these parts; then the end."""

    def script(job: Job) -> Iterable[Step]:
        for i, token in enumerate(tokens):
            fin = end(**finish) if i == len(tokens) - 1 else None
            said = [TokenLogprob(65, b"A", -0.5)] if logprobs else None
            yield [Row("job", 1, 7, c, i, [65], [token or ""], said, fin) for c in range(job.choices)]

    return script


def tool(text: str = "", index: int = 0, call: str | None = None, name: str | None = None) -> Part:
    return Part("tool", text, index, call, name)


# -- requests ------------------------------------------------------------------------------------------------


CHOICES: list[tuple[dict[str, Any], Any]] = [
    ({}, "auto"),
    ({"tool_choice": "auto"}, "auto"),
    ({"tool_choice": "required"}, "required"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
        {"type": "function", "function": {"name": "clock"}},
    ),
]


@pytest.mark.parametrize(("wish", "choice"), CHOICES)
async def test_tools_and_choice_reach_the_worker(wish: dict[str, Any], choice: Any) -> None:
    parse = (await job_of(tools=[WEATHER, CLOCK], **wish)).generation.parse
    assert parse is not None
    assert parse.choice == choice
    assert [t["function"]["name"] for t in parse.tools] == ["weather", "clock"]
    assert parse.parallel
    assert parse.whole


async def test_templates_see_the_tools_with_all_keys() -> None:
    text = text_of((await job_of(tools=[WEATHER, CLOCK])).generation.token_ids)
    assert text.startswith(
        '[{"type": "function", "function": {"name": "weather", "description": null, "parameters": {"type": "object"}}}, '
        '{"type": "function", "function": {"name": "clock", "description": "what time it is", "parameters": null, '
        '"strict": true}}]'
    )


async def test_with_tool_choice_none_the_model_sees_the_tools_and_nothing_is_parsed() -> None:
    job = await job_of(tools=[WEATHER], tool_choice="none")
    assert job.generation.parse is None
    assert "weather" in text_of(job.generation.token_ids)


async def test_without_tools_and_reasoning_parser_the_answer_is_plain() -> None:
    assert (await job_of()).generation.parse is None


async def test_a_reasoning_parser_works_without_tools() -> None:
    parse = (await job_of(THINKER, stream=True, include_reasoning=False)).generation.parse
    assert parse is not None
    assert (parse.tools, parse.choice, parse.reasoning, parse.whole) == ([], "none", False, False)


async def test_one_call_at_a_time_can_be_asked_for() -> None:
    parse = (await job_of(tools=[WEATHER], parallel_tool_calls=False)).generation.parse
    assert parse is not None
    assert not parse.parallel


async def test_effort_and_kwargs_reach_template_and_parser() -> None:
    card = msgspec.structs.replace(THINKER, template_kwargs={"style": "calm"})
    parse = (await job_of(card, reasoning_effort="none", chat_template_kwargs={"a": 1})).generation.parse
    assert parse is not None
    assert parse.template_kwargs == {"style": "calm", "a": 1, "enable_thinking": False, "reasoning_effort": "none"}
    told = (await job_of(card, reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})).generation.parse
    assert told is not None
    assert told.template_kwargs["enable_thinking"] is False


async def test_only_allowed_tools_are_offered() -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    parse = (
        await job_of(tools=[WEATHER, CLOCK], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    ).generation.parse
    assert parse is not None
    assert (parse.choice, [t["function"]["name"] for t in parse.tools]) == ("required", ["clock"])


async def test_a_freeform_tool_is_a_function_with_one_text_to_model_and_worker() -> None:
    parse = (await job_of(tools=[WEATHER, LARK], tool_choice="auto")).generation.parse
    assert parse is not None
    function = parse.tools[1]["function"]
    assert (parse.tools[1]["type"], function["name"], function["parameters"]["required"]) == ("function", "patch", ["input"])
    assert 'start: "a"' in function["description"]
    plain = {"type": "custom", "custom": {"name": "say"}}
    named = (await job_of(tools=[plain, LARK], tool_choice=plain)).generation.parse
    assert named is not None
    assert named.choice == {"type": "function", "function": {"name": "say"}}
    allowed = {"mode": "required", "tools": [plain]}
    kept = await job_of(tools=[plain, LARK], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert kept.generation.parse is not None
    assert [tool["function"]["name"] for tool in kept.generation.parse.tools] == ["say"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_of_a_freeform_tool_has_its_input_as_text(stream: bool) -> None:
    said = parts(
        [tool('{"inp', 0, "c0", "patch")], [tool('ut":"a\\', 0)], [tool('nb"}', 0)], [tool("{}", 1, "c1", "weather")],
        reason="tool_calls",
    )  # fmt: skip
    call, _ = await ask(script=said, tools=[WEATHER, LARK], stream=stream)
    assert call.status == 200, call.body
    if not stream:
        ChatCompletion.model_validate(call.json())
        calls = call.json()["choices"][0]["message"]["tool_calls"]
        assert calls[0] == {"type": "custom", "id": "c0", "custom": {"name": "patch", "input": "a\nb"}}
        assert calls[1] == {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": "{}"}}
        return
    deltas = [event["choices"][0]["delta"] for event in call.events() if event != "[DONE]"]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert pieces[0] == {"index": 0, "id": "c0", "type": "custom", "custom": {"name": "patch", "input": ""}}
    assert "".join(piece["custom"]["input"] for piece in pieces[:-1]) == "a\nb"
    assert pieces[-1]["function"] == {"name": "weather", "arguments": "{}"}


async def test_past_calls_of_freeform_tools_are_calls_of_functions_to_the_template() -> None:
    past = {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "patch", "input": "a"}}]}
    job = await job_of(messages=[past, {"role": "tool", "tool_call_id": "c", "content": "done"}], tools=[LARK])
    assert '"function": {"name": "patch", "arguments": {"input": "a"}}' in text_of(job.generation.token_ids)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": []}, "tools"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [WEATHER, {"type": "function", "function": {"name": "x", "parameters": 3}}]}, "tools[1].function.parameters"),
    ({"tools": [WEATHER, {"type": "web_search"}]}, "tools[1].type"),
    ({"tools": [WEATHER, {"type": "custom"}]}, "tools[1].custom"),
    ({"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "grammar"}}}]}, "tools[0].custom.format.grammar"),
    ({"tools": [WEATHER, {"type": "custom", "custom": {"name": "weather"}}]}, "tools"),
    ({"tools": [LARK], "tool_choice": "required"}, "tools[0].format"),
    ({"tools": [WEATHER, LARK], "tool_choice": {"type": "custom", "custom": {"name": "patch"}}}, "tools[1].format"),
    ({"tools": [LARK], "tool_choice": {"type": "function", "function": {"name": "patch"}}}, "tool_choice.function.name"),
    ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice.custom.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"functions": [{"name": "x"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0].function.name"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "x"}}]}]},
        "messages[0].tool_calls[0].custom",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "mcp"}]}]}, "messages[0].tool_calls[0].type"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "tool", "tool_call_id": "a"}]}, "messages[0].content"),
]


@pytest.mark.parametrize(("change", "param"), BAD)
async def test_what_is_wrong_with_tools_is_named(change: dict[str, Any], param: str) -> None:
    call, ingress = await ask(**change)
    assert (call.status, call.error["param"]) == (400, param), call.body
    assert not ingress.jobs


async def test_auto_needs_a_parser_and_says_how_to_get_one() -> None:
    call, _ = await ask(CARD, tools=[WEATHER])
    assert (call.status, call.error["code"]) == (400, "no_tool_parser")
    assert "--tool-parser" in call.error["message"]
    assert (await ask(CARD, tools=[WEATHER], tool_choice="required"))[0].status == 200


# -- conversations -------------------------------------------------------------------------------------------


async def messages_seen(messages: list[dict[str, Any]], template: str = TEMPLATE) -> str:
    ingress = serving()
    ingress.models.served[MODEL] = FakeServed(TOOL_CARD, FILES | {"chat_template.jinja": template.encode()})
    call = await post(frontend(ingress).app, chat(messages=messages))
    assert call.status == 200, call.body
    return text_of(ingress.jobs[0].generation.token_ids)


async def test_past_calls_become_objects_and_count() -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": '{"city'}}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [called, broken], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "cold"}]},
    ]
    text = await messages_seen(history)
    assert '"arguments": {"city": "Oslo"}' in text
    assert '"arguments": {}' in text
    assert '"reasoning": "hm", "reasoning_content": "hm"' in text
    assert '<tool>{"role": "tool", "content": "cold", "tool_call_id": "c1"}' in text
    parse = (await job_of(messages=history, tools=[WEATHER])).generation.parse
    assert parse is not None
    assert parse.calls_before == 2


async def test_what_a_message_has_no_use_for_is_not_shown_to_the_template() -> None:
    text = await messages_seen([{"role": "user", "content": "x", "tool_call_id": "c", "whatever": 1, "refusal": None}])
    assert text == '-<user>{"role": "user", "content": "x"}'


GENERIC = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
KNOWING = GENERIC + "{% if false %}{{ 'developer' }}{% endif %}"
STRICT = "{% for m in messages %}{% if m.role in ('system', 'user') %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(("template", "role"), [(KNOWING, "developer"), (GENERIC, "system"), (STRICT, "system")])
async def test_a_developers_words_reach_templates_that_do_not_know_the_role(template: str, role: str) -> None:
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert await messages_seen(messages, template) == f"<{role}>be brief<user>hi"


# -- answers -------------------------------------------------------------------------------------------------

CALLING: tuple[list[Part], ...] = (
    [Part("reasoning", "let me ")],
    [Part("reasoning", "see"), Part("content", "Well")],
    [],
    [Part("content", ".")],
    [tool(call="call-1", name="weather")],
    [tool('{"city":')],
    [tool('"Oslo"}'), tool("", 1, "call-2", "clock")],
    [tool("{}", 1)],
)


async def whole(script: Any, card: ModelCard = THINKER, **body: Any) -> Any:
    call, _ = await ask(card, script, **({"tools": [WEATHER, CLOCK]} | body))
    assert call.status == 200, call.body
    ChatCompletion.model_validate(call.json())
    return call.json()


async def streamed(script: Any, card: ModelCard = THINKER, **body: Any) -> list[Any]:
    call, _ = await ask(card, script, stream=True, **({"tools": [WEATHER, CLOCK]} | body))
    assert call.status == 200, call.body
    events = call.events()
    assert events.pop() == "[DONE]"
    return events


async def test_parts_become_the_message() -> None:
    answer = await whole(parts(*CALLING, reason="tool_calls", reasoning_tokens=2))
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Well."
    assert message["reasoning"] == message["reasoning_content"] == "let me see"
    assert message["tool_calls"] == [
        {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}},
        {"id": "call-2", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
    ]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


async def test_everything_may_come_with_the_end() -> None:
    def script(job: Job) -> Iterable[Step]:
        tail = [part for token in CALLING for part in token]
        yield [Row("job", 1, 7, 0, 0, [65, 65], ["", ""], None, Finish(reason="tool_calls", tail=tail))]

    held = await whole(script)
    message = (await whole(parts(*CALLING)))["choices"][0]["message"]
    assert held["choices"][0]["message"] == message
    events = await streamed(script)
    assert [e["choices"][0]["delta"].get("content") for e in events] == ["", "Well.", None]


async def test_content_is_null_where_there_are_only_calls() -> None:
    only = parts([tool("{}", 0, "c", "clock")], reason="tool_calls")
    assert (await whole(only))["choices"][0]["message"]["content"] is None
    # where a tool had to be called vLLM's server gives an empty text
    assert (await whole(only, tool_choice="required"))["choices"][0]["message"]["content"] == ""
    plain = (await whole(parts([Part("content", "hi")])))["choices"][0]["message"]
    assert (plain["content"], plain["reasoning"], "tool_calls" in plain) == ("hi", None, False)


async def test_the_stream_says_the_same_as_the_whole_answer() -> None:
    script = parts(*CALLING, reason="tool_calls")
    events = await streamed(script)
    state = ChatCompletionStreamState()
    for event in events:
        state.handle_chunk(ChatCompletionChunk.model_validate(event))
    message = state.get_final_completion().choices[0].message
    expected = (await whole(script))["choices"][0]["message"]
    assert message.content == expected["content"]
    assert message.tool_calls is not None
    calls = [(c.id, c.type, c.function.name, c.function.arguments) for c in message.tool_calls]
    assert calls == [(c["id"], c["type"], c["function"]["name"], c["function"]["arguments"]) for c in expected["tool_calls"]]
    said = [e["choices"][0]["delta"] for e in events]
    assert "".join(d.get("reasoning_content", "") for d in said) == expected["reasoning_content"]
    assert "".join(d.get("reasoning", "") for d in said) == expected["reasoning"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_argument_pieces_are_streamed_as_they_come() -> None:
    deltas = [e["choices"][0]["delta"] for e in await streamed(parts(*CALLING))]
    calls = [d["tool_calls"] for d in deltas if "tool_calls" in d]
    assert calls == [
        [{"index": 0, "id": "call-1", "type": "function", "function": {"name": "weather", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"city":'}}],
        [
            {"index": 0, "function": {"arguments": '"Oslo"}'}},
            {"index": 1, "id": "call-2", "type": "function", "function": {"name": "clock", "arguments": ""}},
        ],
        [{"index": 1, "function": {"arguments": "{}"}}],
    ]


async def test_tokens_without_text_are_told_where_they_were_asked_for() -> None:
    script = parts(*CALLING, logprobs=True)
    events = await streamed(script, logprobs=True, return_token_ids=True, n=2)
    for choice in range(2):
        ids = [i for e in events for c in e["choices"] if c["index"] == choice for i in c.get("token_ids", ())]
        assert len(ids) == len(CALLING)
    assert len(await streamed(script)) == len([t for t in CALLING if t]) + 2


@pytest.mark.parametrize("stream", [False, True])
async def test_hidden_reasoning_is_not_given_away_by_its_tokens(stream: bool) -> None:
    body: dict[str, Any] = {"logprobs": True, "return_token_ids": True, "include_reasoning": False}
    script = parts([], [Part("content", "hi")], logprobs=True)
    answers = await streamed(script, **body) if stream else [await whole(script, **body)]
    choices = [c for answer in answers for c in answer["choices"]]
    assert all(c["logprobs"] is None and "token_ids" not in c for c in choices)


async def test_an_echoed_message_comes_before_the_answer() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am "}]
    body: dict[str, Any] = {"messages": messages, "echo": True, "continue_final_message": True, "add_generation_prompt": False}
    answer = await whole(parts([Part("content", "here")]), **body)
    assert answer["choices"][0]["message"]["content"] == "I am here"
    events = await streamed(parts([Part("content", "here")]), **body)
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "I am here"
    other = await whole(parts([Part("content", "here")]), echo=True)
    assert other["choices"][0]["message"]["content"] == "here"


async def test_prompt_ids_come_once_and_beside_the_choices() -> None:
    call, ingress = await ask(THINKER, parts(*CALLING), stream=True, return_token_ids=True)
    told = [e["prompt_token_ids"] for e in call.events()[:-1] if "prompt_token_ids" in e]
    assert told == [unpack_u32(ingress.jobs[0].generation.token_ids)]
