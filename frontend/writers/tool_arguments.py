"""Turns the arguments of a tool call into an object, for APIs that require one."""

from __future__ import annotations

from typing import Any

import msgspec
import structlog

from headrace.frontend.writers.content_blocks import ContentBlock

log = structlog.get_logger()


def arguments_of(block: ContentBlock, answer_id: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. `answer_id` is for the log."""
    text = block.text
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    # invalid or truncated arguments are shown rather than dropped
    log.warning("tool_input.not_an_object", message=answer_id, tool=block.name, characters=len(text))
    return {"unparsed_arguments": text}
