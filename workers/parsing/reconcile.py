"""Compares a streamed answer with the same answer parsed as a whole, and returns the parts that complete it, if possible."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.broker.messages import Part
from headrace.broker.output_parts import Call, OutputParts

Outcome = Literal["same", "completed", "differs"]


def reconcile(streamed: OutputParts, whole: OutputParts) -> tuple[Outcome, list[Part]]:
    """Return the outcome and the parts missing in `streamed`, whose parts cannot be taken back.

    White space around content and reasoning, and the way arguments are spaced, make no difference.
    """
    reasoning = _rest(streamed.reasoning, whole.reasoning)
    content = _rest(streamed.content, whole.content)
    if reasoning is None or content is None or len(streamed.calls) > len(whole.calls):
        return "differs", []
    parts = [Part("reasoning", reasoning)] if reasoning else []
    if content:
        parts.append(Part("content", content))
    for index, call in enumerate(whole.calls):
        if index >= len(streamed.calls):
            parts.append(Part("tool", call.arguments, index, call.id, call.name))
            continue
        rest = _arguments(streamed.calls[index], call)
        if rest is None:
            return "differs", []
        if rest:
            parts.append(Part("tool", rest, index))
    return ("completed" if parts else "same"), parts


def _rest(streamed: str, whole: str) -> str | None:
    """Return the missing end of `streamed`, or None if it is not a beginning of `whole`."""
    if streamed.strip() == whole.strip():
        return ""
    return whole[len(streamed) :] if whole.startswith(streamed) else None


def _arguments(streamed: Call, whole: Call) -> str | None:
    if streamed.name != whole.name:
        return None
    if streamed.arguments.strip() == whole.arguments.strip() or _same_json(streamed.arguments, whole.arguments):
        return ""
    return whole.arguments[len(streamed.arguments) :] if whole.arguments.startswith(streamed.arguments) else None


def _same_json(one: str, other: str) -> bool:
    try:
        return bool(msgspec.json.decode(one) == msgspec.json.decode(other))
    except msgspec.DecodeError:
        return False
