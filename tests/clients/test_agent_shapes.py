"""The requests that Codex and Claude Code send, by their shape: both are programs that cannot be run here."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from conftest import CHAT, called

from tests.support.frontend.codex_shape import codex_turn


@pytest.fixture
def http(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=30)


def events(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a shell command and returns its output.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "workdir": {"type": "string"},
            "timeout_ms": {"type": "number"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}


def codex(**more: Any) -> dict[str, Any]:
    return {**codex_turn(CHAT, "List the files.", tools=[SHELL]), **more}


def test_codex_calls_its_shell_and_sends_everything_again(http: httpx.Client) -> None:
    extra = {"vllm_xargs": {"sim_answer": f"<think>hm</think>{called('shell', command=['ls'])}"}}
    headers = {
        "originator": "codex_cli_rs",
        "session_id": "0199a213",
        "accept": "text/event-stream",
        "openai-beta": "responses=v1",
    }
    first = events(http.post("/v1/responses", json=codex(**extra), headers=headers))
    output = first[-1]["response"]["output"]
    assert first[-1]["type"] == "response.completed"
    assert [item["type"] for item in output] == ["reasoning", "function_call"]
    call = output[1]
    assert json.loads(call["arguments"]) == {"command": ["ls"]}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"output":"a.py"}'}
    again = codex(vllm_xargs={"sim_answer": "One file: a.py."})
    again["input"] += [*output, result]
    last = events(http.post("/v1/responses", json=again, headers=headers))[-1]
    assert last["type"] == "response.completed"
    assert last["response"]["output"][-1]["content"][0]["text"] == "One file: a.py."


def claude(**more: Any) -> dict[str, Any]:
    """A turn of Claude Code by the Messages API."""
    cached = {"cache_control": {"type": "ephemeral"}}
    schema = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    return {
        "model": CHAT,
        "max_tokens": 400,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;\nYou are an agent.", **cached},
            {"type": "text", "text": "Be brief.", **cached},
        ],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "<system-reminder/>"}, {"type": "text", "text": "hi", **cached}],
            }
        ],
        "tools": [{"name": "Bash", "description": "Runs a command", "input_schema": schema, **cached}],
        "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "temperature": 1,
        "stream": True,
        **more,
    }


CLAUDE = {
    "x-api-key": "none",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
}


def test_claude_code_calls_its_tools_and_sends_everything_again(http: httpx.Client) -> None:
    extra = {"vllm_xargs": {"sim_answer": f"<think>hm</think>I look.{called('Bash', command='ls')}"}}
    first = events(http.post("/v1/messages?beta=true", json=claude(**extra), headers=CLAUDE))
    assert [event["content_block"]["type"] for event in first if event["type"] == "content_block_start"] == [
        "thinking",
        "text",
        "tool_use",
    ]
    use = next(event["content_block"] for event in first if event.get("content_block", {}).get("type") == "tool_use")
    again = claude(vllm_xargs={"sim_answer": "One file."})
    again["messages"] += [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": use["id"], "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "a.py", "is_error": False}]},
    ]
    last = events(http.post("/v1/messages?beta=true", json=again, headers=CLAUDE))
    assert last[-1]["type"] == "message_stop"
    assert "".join(event["delta"].get("text", "") for event in last if event["type"] == "content_block_delta") == "One file."


def test_claude_code_counts_lists_models_and_looks_whether_the_server_is_there(http: httpx.Client) -> None:
    counted = {key: value for key, value in claude().items() if key in ("model", "messages", "tools", "system", "thinking")}
    answer = http.post("/v1/messages/count_tokens?beta=true", json=counted, headers=CLAUDE)
    assert answer.json()["input_tokens"] > 0
    assert http.head("/").status_code == 200
    listed = http.get("/v1/models?limit=1000", headers=CLAUDE).json()
    assert ([model["id"] for model in listed["data"]], listed["has_more"]) == ([CHAT], False)
