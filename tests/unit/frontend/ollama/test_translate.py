"""Messages of Ollama's API as messages of a chat."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.frontend.errors import BadRequest
from headrace.frontend.ollama.schema import OllamaChatRequest, OllamaPromptRequest
from headrace.frontend.ollama.translate import chat_of, chat_of_prompt


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
