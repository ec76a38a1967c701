"""The shape of a turn of Codex by the Responses API. It imports nothing: clients have an environment of their own."""

from __future__ import annotations

import json
from typing import Any

DEPOT: Any = {  # as the tools of an MCP server come
    "type": "namespace",
    "name": "mcp__depot",
    "description": "The depot's server.",
    "tools": [
        {
            "type": "function",
            "name": "stock",
            "description": "stock does it.",
            "parameters": {"type": "object", "properties": {"article": {"type": "string"}}, "required": ["article"]},
            "strict": True,
        },
        {"type": "custom", "name": "note", "description": "Writes."},
    ],
}


def hermes_call(name: str, **arguments: Any) -> str:
    """Return a call as models write it whose parser is `hermes`."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def said(role: str, text: str) -> dict[str, Any]:
    """Return a message."""
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def codex_turn(model: str, task: str, *items: dict[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a request: nothing is stored, and everything said so far (`items`) is sent again."""
    return {
        "model": model,
        "instructions": "You are a coding agent.",
        "input": [
            said("developer", "<permissions instructions>Ask first.</permissions instructions>"),
            said("user", "<environment_context>\n  <cwd>/src</cwd>\n</environment_context>"),
            said("user", task),
            *items,
        ],
        "tools": tools,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199d3a2-7f5c-7b62-9d3e-2f1a5c0b7e11",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "a"},
    }
