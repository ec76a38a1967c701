"""What a stream of the Responses API must look like, as a machine that takes one event after the other.

Written from the API's description; the shapes are those of the `openai` package.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from openai.types import responses as types
from pydantic import TypeAdapter

from tests.support.frontend.open_responses import problems

SHAPES: dict[str, Any] = {
    "response.created": types.ResponseCreatedEvent,
    "response.queued": types.ResponseQueuedEvent,
    "response.in_progress": types.ResponseInProgressEvent,
    "response.output_item.added": types.ResponseOutputItemAddedEvent,
    "response.output_item.done": types.ResponseOutputItemDoneEvent,
    "response.content_part.added": types.ResponseContentPartAddedEvent,
    "response.content_part.done": types.ResponseContentPartDoneEvent,
    "response.output_text.delta": types.ResponseTextDeltaEvent,
    "response.output_text.done": types.ResponseTextDoneEvent,
    "response.reasoning_text.delta": types.ResponseReasoningTextDeltaEvent,
    "response.reasoning_text.done": types.ResponseReasoningTextDoneEvent,
    "response.function_call_arguments.delta": types.ResponseFunctionCallArgumentsDeltaEvent,
    "response.function_call_arguments.done": types.ResponseFunctionCallArgumentsDoneEvent,
    "response.custom_tool_call_input.delta": types.ResponseCustomToolCallInputDeltaEvent,
    "response.custom_tool_call_input.done": types.ResponseCustomToolCallInputDoneEvent,
    "response.completed": types.ResponseCompletedEvent,
    "response.incomplete": types.ResponseIncompleteEvent,
    "response.failed": types.ResponseFailedEvent,
    "error": types.ResponseErrorEvent,
}
CALLS = {  # by the type of the item: the name of its events, and the key of its text
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
TEXT = {"message": "output_text", "reasoning": "reasoning_text"}
LAST = ("response.completed", "response.incomplete", "response.failed")


def check_shape(event: dict[str, Any]) -> None:
    _adapter(event["type"]).validate_python(event)
    if event["type"] != "error":  # the specification nests its fields, OpenAI's client reads them flat
        assert problems(event) == []


@cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(SHAPES[kind])


class Machine:
    """Feed `take`; `ended` says whether the last event was the last one. The items as they were done are in `items`."""

    def __init__(self) -> None:
        self.number = 0
        self.ended = False
        self.items: list[dict[str, Any]] = []
        self.final: dict[str, Any] = {}
        self._item: dict[str, Any] | None = None
        self._part = "none"  # none, open, said, done
        self._text = ""

    def take(self, event: dict[str, Any]) -> None:
        check_shape(event)
        assert not self.ended
        assert event["sequence_number"] == self.number
        self.number += 1
        kind = event["type"]
        if self.number <= 2:
            assert kind == ("response.created", "response.in_progress")[self.number - 1]
            assert event["response"]["status"] == "in_progress"
        elif kind in LAST:
            assert kind == "response.failed" or self._item is None
            self.ended, self.final = True, event["response"]
            assert kind == f"response.{self.final['status']}"
        else:
            assert event["output_index"] == len(self.items)
            self._inside(kind.removeprefix("response."), event)

    def _inside(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "output_item.added":
            assert self._item is None
            self._item, self._part, self._text = event["item"], "none", ""
            assert self._item["status"] == "in_progress"
            return
        item = self._item
        assert item is not None
        if kind == "output_item.done":
            done = event["item"]
            assert (done["id"], done["type"]) == (item["id"], item["type"])
            assert self._part == "done"
            if item["type"] in CALLS:
                assert done[CALLS[item["type"]][1]] == self._text
                assert (done["call_id"], done["name"]) == (item["call_id"], item["name"])
            else:
                assert [part["text"] for part in done["content"]] == [self._text]
            self.items.append(done)
            self._item = None
            return
        assert event["item_id"] == item["id"]
        if item["type"] in CALLS:
            self._call(kind, event, *CALLS[item["type"]])
        else:
            self._content(kind, event, TEXT[item["type"]])

    def _call(self, kind: str, event: dict[str, Any], name: str, key: str) -> None:
        if kind == f"{name}.delta":
            assert self._part == "none"
            self._text += event["delta"]
        else:
            assert (kind, self._part) == (f"{name}.done", "none")
            assert event[key] == self._text
            self._part = "done"

    def _content(self, kind: str, event: dict[str, Any], text: str) -> None:
        assert event["content_index"] == 0
        if kind == "content_part.added":
            assert self._part == "none"
            assert (event["part"]["type"], event["part"]["text"]) == (text, "")
            self._part = "open"
        elif kind == f"{text}.delta":
            assert self._part == "open"
            assert event["delta"]
            self._text += event["delta"]
        elif kind == f"{text}.done":
            assert self._part == "open"
            assert event["text"] == self._text
            self._part = "said"
        else:
            assert (kind, self._part) == ("content_part.done", "said")
            assert (event["part"]["type"], event["part"]["text"]) == (text, self._text)
            self._part = "done"
