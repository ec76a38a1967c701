"""Parses an answer with vLLM's parser: streamed by `parse_delta`, one token at a time, or as a whole by `parse`."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import structlog

from headrace.broker.messages import Parsing, Part
from headrace.broker.output_parts import OutputParts
from headrace.workers import metrics
from headrace.workers.parsing.call_ids import stable_call_id
from headrace.workers.parsing.reconcile import reconcile
from headrace.workers.parsing.stages import overlap

log = structlog.get_logger()


class AnswerPlan(Protocol):
    """The request of an answer, as its reader needs it; `request` is vLLM's."""

    parsing: Parsing
    request: Any
    prompt_ids: list[int]
    late: bool
    lead: str | None

    def fresh(self) -> Any: ...


class Lead:
    """Releases the content before a mark as far as it is certain. A lone blank may still be dropped."""

    __slots__ = ("_begun", "_held", "_mark", "_over")

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._held = ""
        self._begun = self._over = False

    def push(self, text: str) -> str:
        """Return the content that is certain now."""
        if self._over:
            return ""
        before, mark, _ = (self._held + text).partition(self._mark)
        self._over = bool(mark)
        keep = 0 if mark else overlap(before, self._mark)
        ready, self._held = before[: len(before) - keep], before[len(before) - keep :]
        if not self._begun and ready in ("", " "):
            self._held = ready + self._held
            return ""
        self._begun = True
        return ready


class AnswerReader:
    """Reads an answer. Implements `headrace.workers.parsing.interface.AnswerParser`."""

    __slots__ = ("_choice", "_ids", "_lead", "_parser", "_plan", "_request_id", "_said", "_text", "_tokens", "called")

    def __init__(self, plan: AnswerPlan, request_id: str, choice: int) -> None:
        self._plan = plan
        self._request_id, self._choice = request_id, choice
        self._parser = plan.fresh()
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._said = OutputParts()
        self._ids: dict[int, str] = {}
        self._lead = Lead(plan.lead) if plan.lead is not None else None
        self.called = False

    def push(self, token_id: int, text: str) -> list[Part]:
        self._tokens.append(token_id)
        if text:
            self._text.append(text)
        if self._plan.late:
            return self._led(text)
        return self._streamed([token_id], text, finished=False)

    def finish(self, token_id: int | None, text: str) -> list[Part]:
        last = [] if token_id is None else [token_id]
        self._tokens += last
        self._text.append(text)
        if self._plan.late:
            whole, self._parser = self._whole()
            parts = self._rest_of(whole) if self._lead is not None else self._handed_out(whole)
            self.called = self.called or any(part.kind == "tool" for part in parts)
            return parts
        parts = self._streamed(last, text, finished=True)
        return parts + self._settled()

    def reasoning_tokens(self) -> int:
        return int(self._parser.count_reasoning_tokens(tuple(self._tokens))) if self._parser is not None else 0

    def _streamed(self, tokens: list[int], text: str, *, finished: bool) -> list[Part]:
        if self._parser is None:
            parts = [Part("content", text)] if text else []
        else:
            delta = self._parser.parse_delta(
                text, tokens, self._plan.request, prompt_token_ids=self._plan.prompt_ids, finished=finished
            )
            parts = self._parts(delta) if delta is not None else []
        if parts:
            self._said.add(parts)
        return parts

    def _parts(self, delta: Any) -> list[Part]:
        parts = []
        if delta.reasoning:
            parts.append(Part("reasoning", delta.reasoning))
        if delta.content:
            parts.append(Part("content", delta.content))
        for call in delta.tool_calls or ():
            if call.index and not self._plan.parsing.parallel:
                continue
            self.called = True
            function = call.function
            name = function.name if function is not None else None
            arguments = (function.arguments if function is not None else None) or ""
            identity = self._identity(call.index, call.id) if name or call.id else None
            if arguments or name or identity:
                parts.append(Part("tool", arguments, call.index, identity, name))
        return parts

    def _identity(self, index: int, given: str | None) -> str | None:
        """Return the id of a call with its first piece, later None."""
        if index in self._ids:
            return None
        self._ids[index] = stable_call_id(given, self._request_id, self._choice, index)
        return self._ids[index]

    def _whole(self) -> tuple[OutputParts, Any]:
        """Parse the whole answer. Returns its parts and the parser."""
        said, text = OutputParts(), "".join(self._text)
        parser = self._plan.fresh()
        if parser is None:
            said.content = text
            return said, None
        parser.set_prompt_token_ids(self._plan.prompt_ids)
        reasoning, content, calls = parser.parse(
            text,
            self._plan.request,
            enable_auto_tools=True,
            model_output_token_ids=self._tokens,
        )
        said.reasoning = (reasoning or "") if self._plan.parsing.reasoning else ""
        said.content = content or ""
        for index, call in enumerate(calls or ()):
            if index and not self._plan.parsing.parallel:
                break
            said.add([Part("tool", call.arguments or "", index, call.id, call.name)])
        return said, parser

    def _led(self, text: str) -> list[Part]:
        """Return the content that is certain although the answer is parsed at its end."""
        content = self._lead.push(text) if self._lead is not None else ""
        if not content:
            return []
        parts = [Part("content", content)]
        self._said.add(parts)
        return parts

    def _handed_out(self, said: OutputParts) -> list[Part]:
        parts = [Part("reasoning", said.reasoning)] if said.reasoning else []
        if said.content:
            parts.append(Part("content", said.content))
        for index, call in enumerate(said.calls):
            parts.append(Part("tool", call.arguments, index, self._identity(index, call.id), call.name))
        return parts

    def _settled(self) -> list[Part]:
        """Return the parts that complete the streamed answer to the whole one, and count the outcome."""
        try:
            whole, _ = self._whole()
        except Exception as error:  # The client has its answer already.
            metrics.PARSED.labels("differs").inc()
            log.warning("parser.whole_failed", request_id=self._request_id, error=repr(error))
            return []
        return self._rest_of(whole)

    def _rest_of(self, whole: OutputParts) -> list[Part]:
        """Return the parts that were not returned yet, and count the outcome."""
        outcome, missing = reconcile(self._said, whole)
        metrics.PARSED.labels(outcome).inc()
        if outcome == "differs":
            log.info(
                "parser.streamed_differs",
                request_id=self._request_id,
                parser=type(self._parser).__name__,
                calls=[len(self._said.calls), len(whole.calls)],
                content=[len(self._said.content), len(whole.content)],
                reasoning=[len(self._said.reasoning), len(whole.reasoning)],
            )
        parts = [
            msgspec.structs.replace(part, id=self._identity(part.index, part.id)) if part.name else part for part in missing
        ]
        self._said.add(parts)
        self.called = self.called or bool(self._said.calls)
        return parts
