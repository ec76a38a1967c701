"""Implements `headrace.workers.parsing.interface` with vLLM's own parsers for tool calls and reasoning.

They are used as vLLM's chat server uses them, so that every model family works here on the day vLLM supports it: the same
class that combines both kinds, the same adjustment of the request, streamed answers by `parse_delta`, one token at a time, and
whole ones by `parse`.  A streamed answer is taken apart once more as a whole when it ends: what came late is added, and where
the two contradict each other that is counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from headrace.broker.jobs import OutputParts
from headrace.broker.messages.frames import Part
from headrace.broker.messages.requests import Generation, Parsing
from headrace.workers.engine import Engine, EngineConfig, EngineInfo
from headrace.workers.errors import EngineStartFailed, RequestInvalid
from headrace.workers.parsing.interface import (
    ParseRequirements,
    ParserNames,
    check_chosen_tools,
    completion,
    stable_call_id,
)
from headrace.workers.parsing.selection import EngineParserFamily, ParserChoice
from headrace.workers.parsing.stages import overlap
from headrace.workers.tokens import TokenTable
from headrace.workers.vllm.settings import prepare_environment


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

    def __init__(self, plan: VllmPlan, request_id: str, choice: int) -> None:
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
            parts = self._completed(lambda: whole) if self._lead is not None else self._handed_out(whole)
            self.called = self.called or any(part.kind == "tool" for part in parts)
            return parts
        parts = self._streamed(last, text, finished=True)
        return parts + self._completed(lambda: self._whole()[0])

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

    def _completed(self, whole: Callable[[], OutputParts]) -> list[Part]:
        """Return the parts that complete the streamed answer to the whole one."""
        missing = completion(self._said, whole, parser=type(self._parser).__name__, request_id=self._request_id)
        parts = [
            msgspec.structs.replace(part, id=self._identity(part.index, part.id)) if part.name else part for part in missing
        ]
        self._said.add(parts)
        self.called = self.called or bool(self._said.calls)
        return parts


HARMONY = "gpt_oss"
HUNYUAN_OPENS, HUNYUAN_OPENS_IDS = "<think>\n", [14023, 771, 397]  # in the vocabulary that its parser is made for
LATE = frozenset({"hunyuan_a13b", "jamba", "minicpm5", "xlam"})
"""Tool parsers that contradict themselves when they are streamed one token at a time: they leak their own marks, repeat
arguments or see no call at all.  Their answers are taken apart as a whole when they end, which is late but right."""
LEADING = {"jamba": "<tool_calls>"}
"""Of these, tool parsers whose whole answer begins with the content up to the first mark, unchanged: that much is streamed.
The others may change or drop the content before a call once there is one, so nothing may be said before the end."""
LATE_REASONING = frozenset({"granite"})
"""The same of reasoning parsers; two more are late where they cannot be used as they are made to, see `_late_reasoning`."""


class VllmParserFamily(EngineParserFamily):
    """Implements `headrace.workers.parsing.selection.ParserFamily`."""

    ENGINE = "vLLM"

    def known(self, model: str) -> ParserNames:
        prepare_environment(EngineConfig(model=model, served_name=model), os.environ)
        try:
            from vllm.reasoning import ReasoningParserManager
            from vllm.tool_parsers import ToolParserManager
        except ImportError as error:
            raise EngineStartFailed(f"vLLM is not installed or broken: {error}") from error
        return ParserNames(tuple(ToolParserManager.list_registered()), tuple(ReasoningParserManager.list_registered()))

    def check(self, chosen: ParserChoice, model: str, args: Mapping[str, Any]) -> ParserChoice:
        if chosen.tool is None and chosen.reasoning is None:
            return chosen
        tokenizer = _tokenizer(model, args)
        tool = self._fitting(chosen, "tool", lambda name: _compose(tokenizer, None, tool=name))
        reasoning = self._fitting(chosen, "reasoning", lambda name: _compose(tokenizer, None, reasoning=name))
        _compose(tokenizer, None, tool=tool, reasoning=reasoning)
        return ParserChoice(tool, reasoning, chosen.guessed)

    def build(self, engine: Engine, info: EngineInfo, table: TokenTable, chosen: ParserChoice) -> VllmParsers:
        llm = engine.llm  # type: ignore[attr-defined]
        return VllmParsers(llm.renderer.tokenizer, llm.model_config, tool=chosen.tool, reasoning=chosen.reasoning)


def _tokenizer(model: str, args: Mapping[str, Any]) -> Any:
    from vllm.tokenizers import get_tokenizer

    try:
        return get_tokenizer(
            args.get("tokenizer") or model,
            tokenizer_mode=args.get("tokenizer_mode", "auto"),
            trust_remote_code=args.get("trust_remote_code", False),
            revision=args.get("tokenizer_revision") or args.get("revision"),
        )
    except Exception as error:
        raise EngineStartFailed(f"cannot read the tokenizer of {model}: {error}") from error


def _compose(tokenizer: Any, model_type: str | None, *, tool: str | None = None, reasoning: str | None = None) -> Any:
    """Make vLLM's parser class for both kinds together, and try it on this tokenizer. Raises EngineStartFailed."""
    from vllm.parser import ParserManager

    harmony = model_type == HARMONY
    try:
        if harmony or "openai" in (tool, "openai" if reasoning == "openai_gptoss" else None):
            _harmony_vocabulary()
        return ParserManager.get_parser(
            tool_parser_name=tool,
            reasoning_parser_name=reasoning,
            enable_auto_tools=True,
            is_harmony=harmony,
            tokenizer=tokenizer,
        )
    except EngineStartFailed:
        raise
    except Exception as error:
        raise EngineStartFailed(f"the parsers tool={tool} and reasoning={reasoning} do not work here: {error}") from error


def _harmony_vocabulary() -> None:
    """Load the harmony library's vocabulary for gpt-oss, which an old version of it would fetch from the internet."""
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

    try:
        get_encoding()
    except Exception as error:
        raise EngineStartFailed(
            f"the harmony library cannot load its vocabulary ({error}); the package oss-harmony brings it along"
        ) from error


class VllmParsers:
    """Implements `headrace.workers.parsing.interface.ParserSet`. `model_config` is vLLM's own, or None."""

    def __init__(self, tokenizer: Any, model_config: Any, *, tool: str | None, reasoning: str | None) -> None:
        self.tool, self.reasoning = tool, reasoning
        self.tokenizer = tokenizer
        self._model_config = model_config
        model_type = getattr(getattr(model_config, "hf_config", None), "model_type", None)
        self._class = _compose(tokenizer, model_type, tool=tool, reasoning=reasoning)
        self._late_reasoning = _late_reasoning(tokenizer, tool=tool, reasoning=reasoning)
        self._forced = self._class if tool is not None or model_type == HARMONY else self._forcing()

    def _forcing(self) -> Any:
        """Build the parser for forced calls without a set parser: vLLM's base class has them written as plain JSON."""
        from vllm.parser.abstract_parser import DelegatingParser
        from vllm.tool_parsers import ToolParser

        reasoning = self._class.reasoning_parser_cls if self._class is not None else None
        return type("Forcing", (DelegatingParser,), {"reasoning_parser_cls": reasoning, "tool_parser_cls": ToolParser})

    def plan(self, parsing: Parsing, generation: Generation, prompt_ids: Sequence[int]) -> VllmPlan:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        check_chosen_tools(parsing, self.tool)
        wanted = bool(parsing.tools) and parsing.choice != "none"
        make = self._forced if wanted else self._class
        try:
            request = ChatCompletionRequest.model_validate(_request(parsing, generation))
        except (ValueError, TypeError) as error:  # of its own field, or pydantic's
            raise RequestInvalid(_message(error), param="tools") from error
        late_tool = wanted and self.tool in LATE
        late = parsing.whole or self._late_reasoning or late_tool
        streams = late_tool and not parsing.whole and self.reasoning is None and parsing.choice == "auto"
        lead = LEADING.get(self.tool or "") if streams else None
        factory = ParserFactory(make, self.tokenizer, self._model_config)
        plan = VllmPlan(factory, parsing, request, prompt_ids, late=late, lead=lead)
        try:
            plan.adjust(generation)
        except (ValueError, TypeError, KeyError) as error:
            raise RequestInvalid(_message(error), param="tools") from error
        return plan


def _late_reasoning(tokenizer: Any, *, tool: str | None, reasoning: str | None) -> bool:
    """Return whether a reasoning parser must see the whole answer.

    Streamed, that of hunyuan_a13b compares ids with those of its own vocabulary, and that of inkling leaves the last mark to
    the tool parser of that name.
    """
    if reasoning == "hunyuan_a13b":
        return list(tokenizer.encode(HUNYUAN_OPENS, add_special_tokens=False)) != HUNYUAN_OPENS_IDS
    return reasoning in LATE_REASONING or (reasoning == "inkling" and tool != "inkling")


def _message(error: Exception) -> str:
    first = str(error.args[0]) if error.args else str(error)
    return f"vLLM refuses the request: {first[:500]}"


def _request(parsing: Parsing, generation: Generation) -> dict[str, Any]:
    """Build the part of the chat request that the parsers read."""
    request: dict[str, Any] = {
        "messages": _history(parsing.calls_before),
        "include_reasoning": parsing.reasoning,
        "parallel_tool_calls": parsing.parallel,
        "skip_special_tokens": generation.skip_special_tokens,
        "chat_template_kwargs": parsing.template_kwargs,
        "stream": not parsing.whole,
    }
    if parsing.tools:
        request |= {"tools": parsing.tools, "tool_choice": parsing.choice}
    if generation.guided is not None:
        request["structured_outputs"] = generation.guided
    return request


def _history(calls: int) -> list[dict[str, Any]]:
    """Build a conversation with `calls` calls in it, because some families number calls through the conversation."""
    made = [{"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(calls)]
    user = {"role": "user", "content": ""}
    return [user, {"role": "assistant", "content": "", "tool_calls": made}, user] if made else [user]


@dataclass(frozen=True, slots=True)
class ParserFactory:
    """vLLM's parser class and its arguments of the model. `make` is None if there is nothing to parse."""

    make: Any
    tokenizer: Any
    model_config: Any


class VllmPlan:
    """See `headrace.workers.parsing.interface.ParsePlan`.

    `make` is None if there is nothing to take apart; `late`: everything comes at the end, but for the content before the mark
    `lead`, if that is given.
    """

    def __init__(
        self,
        factory: ParserFactory,
        parsing: Parsing,
        request: Any,
        prompt_ids: Sequence[int],
        *,
        late: bool,
        lead: str | None = None,
    ) -> None:
        self._factory = factory
        self.parsing = parsing
        self.request = request
        self.prompt_ids = list(prompt_ids)
        self.late = late
        self.lead = lead
        self.requirements = ParseRequirements()

    def adjust(self, generation: Generation) -> None:
        """Determine the requirements for the engine."""
        parser = self.fresh()
        if parser is None:
            self.requirements = ParseRequirements(guided=generation.guided, skip_special_tokens=generation.skip_special_tokens)
            return
        if self._adjusts(parser):
            self.request = parser.adjust_request(self.request)
        reasons = parser.reasoning_parser is not None
        self.requirements = ParseRequirements(
            guided=_guided(self.request),
            skip_special_tokens=self.request.skip_special_tokens,
            reasoning_ended=self.request.resolve_reasoning_ended(parser, self.prompt_ids),
            reasoning_kwargs={"chat_template_kwargs": self.parsing.template_kwargs} if reasons else None,
        )

    def _adjusts(self, parser: Any) -> bool:
        from vllm.utils.mistral import is_mistral_tokenizer, is_mistral_tool_parser

        tools = parser.tool_parser_cls
        return (
            parser.always_adjust_request
            or parser.reasoning_parser_cls is not None
            or self.request.tool_choice != "none"
            or (
                tools is not None
                and is_mistral_tool_parser(tools)
                and is_mistral_tokenizer(self._factory.tokenizer)
                and self._factory.tokenizer.supports_grammar
            )
        )

    def fresh(self) -> Any:
        """Create a parser of vLLM's, or return None if there is nothing to parse."""
        factory = self._factory
        if factory.make is None:
            return None
        return factory.make(
            factory.tokenizer,
            self.request.tools,
            chat_template_kwargs=self.parsing.template_kwargs,
            model_config=factory.model_config,
        )

    def parser(self, request_id: str, choice: int) -> AnswerReader:
        return AnswerReader(self, request_id, choice)


def _guided(request: Any) -> dict[str, Any] | None:
    """Return the structured output that the request now requires, in Headrace's form."""
    params = request.extract_structured_outputs()
    if params is None:
        return None
    kinds = {f.name: getattr(params, f.name) for f in fields(params) if not f.name.startswith("_")}
    return {name: value for name, value in kinds.items() if value is not None and value is not False}
