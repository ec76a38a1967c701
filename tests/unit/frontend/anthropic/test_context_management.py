"""`context_management` of the Messages API: what is cleared before a conversation becomes a prompt, and what is said of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.frontend.anthropic_client import Client
from tests.support.frontend.fakes import CARD, FILES, MODEL, FakeServed

RESULT = "r" * 100
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}|{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function }}{% endfor %}</s>{% endfor %}"
)
THINKING, TOOL_USES = "clear_thinking_20251015", "clear_tool_uses_20250919"
NEVER = {"type": "tool_uses", "value": 100}
ALWAYS = {"type": "input_tokens", "value": 0}


def step(number: int, *, tool: str = "read") -> list[dict[str, Any]]:
    """A thought and a call of the assistant, and the result of the call."""
    name = f"c{number}"
    thought = {"type": "thinking", "thinking": f"thought{number}", "signature": "s"}
    use = {"type": "tool_use", "id": name, "name": tool, "input": {"path": f"file{number}"}}
    result = {"type": "tool_result", "tool_use_id": name, "content": f"{RESULT}{number}"}
    return [{"role": "assistant", "content": [thought, use]}, {"role": "user", "content": [result]}]


MESSAGES = [
    {"role": "user", "content": "Question0"},
    *step(1),
    *step(2),
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "thought3", "signature": "s"}]},
    {"role": "user", "content": "Question1"},
    *step(4, tool="write"),
    *step(5),
]


def client(context: int = 4096) -> Client:
    made = Client()
    files = {**FILES, "chat_template.jinja": TEMPLATE.encode()}
    card = msgspec.structs.replace(CARD, context_length=context, reasoning_parser="think")
    made.ingress.models.served[MODEL] = FakeServed(card, files)
    return made


def asking(*edits: dict[str, Any]) -> dict[str, Any]:
    return {"messages": MESSAGES, "context_management": {"edits": list(edits)}}


async def prompt_of(*edits: dict[str, Any], context: int = 4096) -> tuple[str, list[dict[str, Any]]]:
    """The prompt of a request with these edits, and what is said to have been applied, whole and streamed."""
    made = client(context)
    answer = await made.create(**asking(*edits))
    assert answer.status == 200, answer.body
    (delta,) = [event for event in await made.stream(**asking(*edits)) if event["type"] == "message_delta"]
    assert delta["context_management"] == answer.json()["context_management"]
    assert made.prompt(0) == made.prompt(1)
    return made.prompt(), answer.json()["context_management"]["applied_edits"]


def numbers(prompt: str, word: str) -> list[int]:
    return [number for number in range(1, 6) if f"{word}{number}" in prompt]


@pytest.mark.parametrize("keep", ["all", {"type": "all"}])
async def test_what_claude_code_asks_for_keeps_all_thinking(keep: Any) -> None:
    prompt, applied = await prompt_of({"type": THINKING, "keep": keep})
    assert (numbers(prompt, "thought"), applied) == ([1, 2, 3, 4, 5], [])


async def test_a_request_without_edits_says_nothing_of_them() -> None:
    made = client()
    assert "context_management" not in (await made.create(messages=MESSAGES)).json()
    assert all("context_management" not in event for event in await made.stream(messages=MESSAGES))


@pytest.mark.parametrize(
    ("edit", "kept", "cleared"),
    [({}, [4, 5], 1), ({"keep": {"type": "thinking_turns", "value": 2}}, [1, 2, 3, 4, 5], 0)],
)
async def test_thinking_of_earlier_turns_is_left_out(edit: dict[str, Any], kept: list[int], cleared: int) -> None:
    whole, _ = await prompt_of()
    prompt, applied = await prompt_of({"type": THINKING, **edit})
    assert numbers(prompt, "thought") == kept
    assert numbers(prompt, "file") == [1, 2, 4, 5], "calls stay"
    said = {"type": THINKING, "cleared_thinking_turns": cleared, "cleared_input_tokens": tokens(whole) - tokens(prompt)}
    assert applied == ([said] if cleared else [])


def tokens(prompt: str) -> int:
    """The tokenizer has one token per byte, and one for the end of a message."""
    return len(prompt.replace("</s>", "."))


@pytest.mark.parametrize(
    ("edit", "results", "inputs"),
    [
        ({"keep": {"type": "tool_uses", "value": 1}}, [5], [1, 2, 4, 5]),
        ({}, [2, 4, 5], [1, 2, 4, 5]),
        ({"keep": {"type": "tool_uses", "value": 0}, "clear_tool_inputs": True}, [], []),
        ({"keep": {"type": "tool_uses", "value": 1}, "clear_tool_inputs": ["write"]}, [5], [1, 2, 5]),
        ({"keep": {"type": "tool_uses", "value": 1}, "exclude_tools": ["write"]}, [4, 5], [1, 2, 4, 5]),
        ({"keep": {"type": "tool_uses", "value": 9}}, [1, 2, 4, 5], [1, 2, 4, 5]),
        ({"trigger": NEVER, "keep": {"type": "tool_uses", "value": 1}}, [1, 2, 4, 5], [1, 2, 4, 5]),
        ({"trigger": {"type": "tool_uses", "value": 3}}, [2, 4, 5], [1, 2, 4, 5]),
        ({"clear_at_least": {"type": "input_tokens", "value": 10_000}}, [1, 2, 4, 5], [1, 2, 4, 5]),
        ({"clear_at_least": {"type": "input_tokens", "value": 10}}, [2, 4, 5], [1, 2, 4, 5]),
    ],
)
async def test_earlier_results_of_tools_are_left_out(edit: dict[str, Any], results: list[int], inputs: list[int]) -> None:
    whole, _ = await prompt_of()
    prompt, applied = await prompt_of({"type": TOOL_USES, "trigger": ALWAYS, **edit})
    assert (numbers(prompt, RESULT), numbers(prompt, "file")) == (results, inputs)
    assert prompt.count("has been cleared") == 4 - len(results)
    said = {"type": TOOL_USES, "cleared_tool_uses": 4 - len(results), "cleared_input_tokens": tokens(whole) - tokens(prompt)}
    assert applied == ([said] if len(results) < 4 else [])


async def test_both_edits_apply_thinking_first_and_count_apart() -> None:
    whole, _ = await prompt_of()
    prompt, applied = await prompt_of({"type": TOOL_USES, "trigger": ALWAYS}, {"type": THINKING})
    assert [edit["type"] for edit in applied] == [THINKING, TOOL_USES]
    assert sum(edit["cleared_input_tokens"] for edit in applied) == tokens(whole) - tokens(prompt)


async def test_a_prompt_that_fits_after_the_edits_is_answered_and_one_that_does_not_is_refused() -> None:
    edit = {"type": TOOL_USES, "trigger": ALWAYS, "keep": {"type": "tool_uses", "value": 0}, "clear_tool_inputs": True}
    whole, _ = await prompt_of()
    prompt, _ = await prompt_of(edit)
    context = (tokens(whole) + tokens(prompt)) // 2
    assert (await prompt_of(edit, context=context))[0] == prompt
    refused = await client(context).create(**asking())
    assert (refused.status, "prompt is too long" in refused.error["message"]) == (400, True)


async def test_counting_counts_what_is_left_and_what_was_there() -> None:
    made = client()
    counted = await made.create("/v1/messages/count_tokens", **asking({"type": TOOL_USES, "trigger": ALWAYS}))
    whole, _ = await prompt_of()
    prompt, _ = await prompt_of({"type": TOOL_USES, "trigger": ALWAYS})
    left = {"input_tokens": tokens(prompt), "context_management": {"original_input_tokens": tokens(whole)}}
    assert counted.json() == left


async def test_a_request_that_is_planned_again_keeps_its_id_and_counts_its_tools_once() -> None:
    made = client()
    answer = await made.create(
        **asking({"type": TOOL_USES, "trigger": ALWAYS}, {"type": THINKING}),
        tools=[{"type": "web_search_20250305", "name": "web_search"}],
    )
    (job,) = made.ingress.jobs
    assert answer.headers["request-id"] == job.id
    assert [value for name, value in answer.sent[0]["headers"] if name == b"headrace-tools-not-offered"] == [b"web_search"]
    metrics = made.frontend.metrics.not_offered.labels("web_search")
    assert metrics._value.get() == 1


@pytest.mark.parametrize(
    ("management", "param"),
    [
        ({"edits": [{"type": "compact_20260112"}]}, "context_management.edits[0].type"),
        ({"edits": [{"type": THINKING, "keep_text": True}]}, "context_management.edits[0]"),
        ({"edits": [{"type": TOOL_USES, "trigger": {"type": "seconds", "value": 1}}]}, "trigger"),
        ({"edits": [], "summary": "short"}, "context_management"),
    ],
)
async def test_an_edit_that_is_not_known_here_is_refused_by_name(management: dict[str, Any], param: str) -> None:
    answer = await client().create(context_management=management)
    assert answer.status == 400
    assert param in answer.error["message"]
