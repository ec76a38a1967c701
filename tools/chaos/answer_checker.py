"""What a client of any API hears, taken apart: texts, arguments of tool calls, the end, compared with what must come."""

from __future__ import annotations

import json
from typing import Any

from headrace.tools.chaos.api_questions import TOOL, ApiQuestion
from headrace.tools.chaos.ledger import Ended, Outcome, divergence

_CRASHED = "crashed"  # in the words of the one error that three crashes make; these APIs have no field for our code


class AnswerChecker:
    """One answer. `take` for each event of a stream, or `whole` for all at once."""

    def __init__(self, question: ApiQuestion) -> None:
        self._question = question
        self._parts: dict[str, str] = {"content": "", "reasoning": "", "logprobs": ""}
        self._calls: dict[Any, list[str]] = {}  # place in the stream → name, arguments
        self._finish: str | None = None
        self.over = False  # the API has said that this was its last event

    # -- streams -----------------------------------------------------------------------------------------------------

    def take(self, event: dict[str, Any]) -> Ended | None:
        """One event; the end if it is one, or shows that something is wrong."""
        if "choices" in event:
            for choice in event["choices"]:
                self._choice(choice.get("delta", choice), choice)
        elif (failed := self._typed(event)) is not None:
            return failed
        return self._wrong(sure=True)

    def _choice(self, delta: dict[str, Any], choice: dict[str, Any]) -> None:
        self._add("content", delta.get("content") or choice.get("text"))
        self._add("reasoning", delta.get("reasoning_content") or delta.get("reasoning"))
        for call in delta.get("tool_calls") or ():
            self._call(call.get("index", len(self._calls)), **call["function"])
        for entry in (choice.get("logprobs") or {}).get("content") or ():
            self._add("logprobs", entry["token"])
        self._finish = choice.get("finish_reason") or self._finish

    def _typed(self, event: dict[str, Any]) -> Ended | None:
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
                self._finish, self.over = event["response"]["status"], True
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
                self.over = True
        return None

    def _add(self, part: str, text: str | None) -> None:
        self._parts[part] += text or ""

    def _call(self, place: Any, *, name: str | None = None, arguments: str | None = None, **_more: Any) -> None:
        call = self._calls.setdefault(place, ["", ""])
        call[0] += name or ""
        call[1] += arguments or ""

    # -- all at once -------------------------------------------------------------------------------------------------

    def whole(self, answer: dict[str, Any]) -> Ended:
        """An answer that was not streamed."""
        if "choices" in answer:
            for choice in answer["choices"]:
                self._choice(choice.get("message", choice), choice)
        else:
            for place, item in enumerate(answer.get("output") or answer.get("content") or ()):
                self._item(place, item)
            self._finish = answer.get("stop_reason") or answer.get("status")
        return self.ended()

    def _item(self, place: int, item: dict[str, Any]) -> None:
        match item["type"]:
            case "message":
                for part in item["content"]:
                    self._add("content", part.get("text"))
            case "text":
                self._add("content", item["text"])
            case "function_call":
                self._call(place, name=item["name"], arguments=item["arguments"])
            case "tool_use":
                self._call(place, name=item["name"], arguments=json.dumps(item["input"]))

    # -- verdicts ----------------------------------------------------------------------------------------------------

    def _expected(self) -> dict[str, str]:
        question = self._question
        return {
            "content": question.content,
            "reasoning": question.reasoning,
            "logprobs": question.content if question.logprobs else "",
        }

    def _wrong(self, *, sure: bool) -> Ended | None:
        expected = self._expected()
        for part, text in self._parts.items():
            if part == "logprobs":
                continue  # the end token has one too, after the text
            wrong = divergence(text, expected[part])
            if wrong is not None and (wrong.sure or not sure):
                return Ended(wrong.outcome, f"{part} {wrong.detail}")
        return None

    def so_far(self) -> Ended | None:
        """What is wrong with that which has come."""
        return self._wrong(sure=False)

    def ended(self) -> Ended:
        """After the last event."""
        if (wrong := self._wrong(sure=False)) is not None:
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
    """An error that came after the first event. It is the frontend's own only while that is down, which the ledger knows."""
    told = f"after the first tokens, {error.get('code') or error.get('type')}: {error.get('message')}"
    if error.get("code") == "poison" or _CRASHED in str(error.get("message")):
        return Ended(Outcome.POISONED, told)
    return Ended(Outcome.CUT, told)
