"""Brings items into the form in which answers list them: with an id, a status, and content as a list of parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Item = dict[str, Any]

ID_PREFIX = {
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "additional_tools": "at",
    "compaction": "cmp",
}
"""The beginning of an item's id by its type; messages have `msg`."""

_WITH_STATUS = frozenset({"message", "function_call", "function_call_output", "tool_search_call", "tool_search_output"})


def item_name(item: Mapping[str, Any], job_id: str, place: str) -> str:
    """Return an id for an item of a request. It has the id of the request's job, so that any ingress can follow it."""
    return f"{ID_PREFIX.get(item.get('type', ''), 'msg')}_{job_id}_{place}"


def listed(item: Mapping[str, Any], name: str) -> Item:
    """Return an item as lists show it. `name` is the id of an item that has none."""
    kind = item.get("type") or "message"
    form: Item = {**item, "type": kind, "id": item.get("id") or name}
    if kind in _WITH_STATUS and form.get("status") is None:
        form["status"] = "completed"
    if kind == "message":
        if isinstance(content := form.get("content"), str):
            form["content"] = [text_part(content, form.get("role") == "assistant")]
    elif kind == "reasoning":
        form["summary"] = form.get("summary") or []
        for key in ("content", "encrypted_content"):
            if form.get(key) is None:
                form.pop(key, None)
    return form


def text_part(text: str, by_model: bool) -> Item:
    """Return a part of a message for its text."""
    if by_model:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}
