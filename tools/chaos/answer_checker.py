"""Checks an answer of any API against the expected one: texts, arguments of tool calls, log-probabilities and finish reason."""

from __future__ import annotations

import json
from typing import Any

from headrace.tools.chaos.api_questions import TOOL, ApiQuestion
from headrace.tools.chaos.ledger import Ended, Outcome, divergence

_CRASHED = "crashed"  # The poison error's message has this word. These APIs have no field for our error code.


class AnswerChecker:
    """Collects one answer and compares it: call `feed` for each event of a stream, or `check_whole` for a body."""

    def __init__(self, question: ApiQuestion) -> None:
        self._question = question
        self._parts: dict[str, str] = {"content": "", "reasoning": "", "logprobs": ""}
        self._calls: dict[Any, list[str]] = {}  # index in the stream → name, arguments
        self._finish: str | None = None
        self.complete = False  # The last event of the API has come.

    # -- streams -----------------------------------------------------------------------------------------------------

    def feed(self, event: dict[str, Any]) -> Ended | None:
        """Add one event. Returns the end if the event is an error or shows that the answer is wrong, else None."""
        if "choices" in event:
            for choice in event["choices"]:
                self._choice(choice.get("delta", choice), choice)
        elif (failed := self._typed_event(event)) is not None:
            return failed
        return self._find_divergence(sure=True)

    def _choice(self, delta: dict[str, Any], choice: dict[str, Any]) -> None:
        self._add("content", delta.get("content") or choice.get("text"))
        self._add("reasoning", delta.get("reasoning_content") or delta.get("reasoning"))
        for call in delta.get("tool_calls") or ():
            self._call(call.get("index", len(self._calls)), **call["function"])
        for entry in (choice.get("logprobs") or {}).get("content") or ():
            self._add("logprobs", entry["token"])
        self._finish = choice.get("finish_reason") or self._finish

    def _typed_event(self, event: dict[str, Any]) -> Ended | None:
        kind = event.get("type")
        if kind in ("error", "response.failed") or "error" in event:
            error = event.get("error") or (event.get("response") or {}).get("error") or event
            return faulted(error)
        match kind:
            case "response.output_text.delta":
                self._add("content", event["delta"])
            case "response.output_item.added" if event["item"]["type"] == "function_call":
                self._call(event["output_index"], name=event["item"]["name"])
            case "response.function_call_arguments.delta":
                self._call(event["output_index"], arguments=event["delta"])
            case "response.completed" | "response.incomplete":
                self._finish, self.complete = event["response"]["status"], True
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                self._call(event["index"], name=event["content_block"]["name"])
            case "content_block_delta":
                delta = event["delta"]
                self._add("content", delta.get("text"))
                if "partial_json" in delta:
                    self._call(event["index"], arguments=delta["partial_json"])
            case "message_delta":
                self._finish = event["delta"]["stop_reason"]
            case "message_stop":
                self.complete = True
        return None

    def _add(self, part: str, text: str | None) -> None:
        self._parts[part] += text or ""

    def _call(self, index: Any, *, name: str | None = None, arguments: str | None = None, **_more: Any) -> None:
        call = self._calls.setdefault(index, ["", ""])
        call[0] += name or ""
        call[1] += arguments or ""

    # -- whole answers -----------------------------------------------------------------------------------------------

    def check_whole(self, answer: dict[str, Any]) -> Ended:
        """Check an answer that was not streamed."""
        if "choices" in answer:
            for choice in answer["choices"]:
                self._choice(choice.get("message", choice), choice)
        else:
            for index, item in enumerate(answer.get("output") or answer.get("content") or ()):
                self._item(index, item)
            self._finish = answer.get("stop_reason") or answer.get("status")
        return self.ended()

    def _item(self, index: int, item: dict[str, Any]) -> None:
        match item["type"]:
            case "message":
                for part in item["content"]:
                    self._add("content", part.get("text"))
            case "text":
                self._add("content", item["text"])
            case "function_call":
                self._call(index, name=item["name"], arguments=item["arguments"])
            case "tool_use":
                self._call(index, name=item["name"], arguments=json.dumps(item["input"]))

    # -- verdicts ----------------------------------------------------------------------------------------------------

    def _expected(self) -> dict[str, str]:
        question = self._question
        return {
            "content": question.content,
            "reasoning": question.reasoning,
            "logprobs": question.content if question.logprobs else "",
        }

    def _find_divergence(self, *, sure: bool) -> Ended | None:
        expected = self._expected()
        for part, text in self._parts.items():
            if part == "logprobs":
                continue  # The end token has a log-probability too, after the text.
            wrong = divergence(text, expected[part])
            if wrong is not None and (wrong.sure or not sure):
                return Ended(wrong.outcome, f"{part} {wrong.detail}")
        return None

    def check_so_far(self) -> Ended | None:
        """Compare the events so far with the beginning of the expected answer. Returns None if they agree."""
        return self._find_divergence(sure=False)

    def ended(self) -> Ended:
        """Return the verdict on the answer, after its last event."""
        if (wrong := self._find_divergence(sure=False)) is not None:
            return wrong
        for part, text in self._expected().items():
            got = self._parts[part]
            if part == "logprobs":
                if not got.startswith(text):
                    return Ended(Outcome.WRONG, f"log-probabilities of {got!r} instead of {text!r}")
            elif got != text:
                return Ended(Outcome.MISSING, f"{part} ended ({self._finish}) after {len(got)} of {len(text)} characters")
        if (wrong := self._wrong_calls()) is not None:
            return wrong
        if self._finish != self._question.finish:
            return Ended(Outcome.WRONG, f"ended with {self._finish!r} instead of {self._question.finish!r}")
        return Ended(Outcome.ANSWERED)

    def _wrong_calls(self) -> Ended | None:
        wanted = [(TOOL, {"names": list(names)}) for names in self._question.calls]
        calls = list(self._calls.values())
        try:
            got = [(name, json.loads(arguments)) for name, arguments in calls]
        except ValueError:
            return Ended(Outcome.WRONG, f"arguments of a tool call that are no JSON: {calls!r}"[:400])
        return None if got == wanted else Ended(Outcome.WRONG, f"tool calls {got!r} instead of {wanted!r}"[:400])


def faulted(error: dict[str, Any]) -> Ended:
    """Classify an error event after the first event. The ledger allows `CUT` only while that frontend was down."""
    detail = f"after the first tokens, {error.get('code') or error.get('type')}: {error.get('message')}"
    if error.get("code") == "poison" or _CRASHED in str(error.get("message")):
        return Ended(Outcome.POISONED, detail)
    return Ended(Outcome.CUT, detail)
