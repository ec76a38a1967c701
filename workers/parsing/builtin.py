"""Provides the parsers that need no engine: for the simulator, and as the reference for tests of the engine-parser adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.broker.messages.frames import Part
from headrace.broker.messages.requests import Generation, Parsing
from headrace.workers.engine import Engine, EngineInfo
from headrace.workers.parsing.interface import (
    PROMPT_END,
    ParseRequirements,
    ParserNames,
    check_chosen_tools,
    forced_schema,
    named_function,
    stable_call_id,
)
from headrace.workers.parsing.selection import Kind, ParserChoice, Traits, traits_of
from headrace.workers.parsing.stages import Hermes, NamedCall, NewId, Plain, Required, Stage, Think
from headrace.workers.tokens import TokenTable

BUNDLED_TOKENIZER = Path(__file__).resolve().parents[1] / "assets" / "smollm2"
KNOWN = ParserNames(tools=("hermes",), reasoning=("think",))

_LIKE = {  # model families with the same marks
    "qwen3": "think",
    "deepseek_r1": "think",
    "deepseek_v3": "think",
    "glm45": "think",
    "kimi_k2": "think",
    "nemotron_v3": "think",
}


class BuiltinParsers:
    """The built-in parsers in use: `tool` and `reasoning` are names in `KNOWN`, or None."""

    def __init__(self, table: TokenTable, *, tool: str | None = None, reasoning: str | None = None) -> None:
        self.tool, self.reasoning = tool, reasoning
        self._table = table

    def plan(self, parsing: Parsing, generation: Generation, prompt_ids: Sequence[int]) -> StagePlan:
        check_chosen_tools(parsing, self.tool)
        schema = forced_schema(parsing)
        requirements = ParseRequirements(
            guided=generation.guided if schema is None else {"json": schema},
            skip_special_tokens=generation.skip_special_tokens and self.tool is None and self.reasoning is None,
        )
        if self.reasoning is None:
            return StagePlan(parsing, requirements, tools=Hermes)
        end = b"".join(self._table.token_bytes(token) for token in prompt_ids[-PROMPT_END:])
        opened = end.rstrip().endswith(Think.OPEN.encode())
        return StagePlan(parsing, requirements, tools=Hermes, reasoning=lambda following: Think(following, opened=opened))


class BuiltinParserFamily:
    """Implements `headrace.workers.parsing.selection.ParserFamily`."""

    def known(self, model: str) -> ParserNames:
        return KNOWN

    def traits(self, model: str, args: Mapping[str, Any]) -> Traits:
        folder = str(args.get("tokenizer_dir") or BUNDLED_TOKENIZER)
        return traits_of(folder, {})

    def translate(self, name: str, kind: Kind) -> str:
        return _LIKE.get(name, name)

    def check(self, chosen: ParserChoice, model: str, args: Mapping[str, Any]) -> ParserChoice:
        return chosen

    def build(self, engine: Engine, info: EngineInfo, table: TokenTable, chosen: ParserChoice) -> BuiltinParsers:
        return BuiltinParsers(table, tool=chosen.tool, reasoning=chosen.reasoning)


class StagePlan:
    """Implements `headrace.workers.parsing.interface.ParsePlan` by stages: reasoning first, then tool calls or plain text."""

    def __init__(
        self,
        parsing: Parsing,
        requirements: ParseRequirements,
        *,
        tools: Callable[[NewId], Stage],
        reasoning: Callable[[Stage], Stage] | None = None,
    ) -> None:
        """`tools` makes the stage for calls that the model chooses, `reasoning` the one in front of it."""
        self.requirements = requirements
        self._parsing = parsing
        self._tools, self._reasoning = tools, reasoning

    def parser(self, request_id: str, choice: int) -> BuiltinParser:
        def new_id(index: int) -> str:
            return stable_call_id(None, request_id, choice, index)

        parsing = self._parsing
        stage: Stage
        name = named_function(parsing)
        if name is not None:
            stage = NamedCall(new_id, name)
        elif parsing.tools and parsing.choice == "required":
            stage = Required(new_id)
        else:
            stage = self._tools(new_id) if parsing.tools and parsing.choice == "auto" else Plain()
        return BuiltinParser(self._reasoning(stage) if self._reasoning is not None else stage, parsing)


class BuiltinParser:
    """Parses an answer. Implements `headrace.workers.parsing.interface.AnswerParser`."""

    __slots__ = ("_kept", "_parsing", "_reasoning_tokens", "_stage", "called")

    def __init__(self, stage: Stage, parsing: Parsing) -> None:
        self._stage = stage
        self._parsing = parsing
        self._kept: list[Part] = []
        self._reasoning_tokens = 0
        self.called = False

    def push(self, token_id: int, text: str) -> list[Part]:
        if not text:
            return []
        parts = self._stage.push(text)
        if not parts:
            return parts
        if any(part.kind == "reasoning" for part in parts):
            self._reasoning_tokens += 1
        parts = self._shown(parts)
        if not self._parsing.whole:
            return parts
        self._kept += parts
        return []

    def finish(self, token_id: int | None, text: str) -> list[Part]:
        parts = self.push(token_id or 0, text) + self._shown(self._stage.finish())
        return _merge_parts(self._kept + parts) if self._parsing.whole else parts

    def reasoning_tokens(self) -> int:
        return self._reasoning_tokens

    def _shown(self, parts: list[Part]) -> list[Part]:
        if not self._parsing.reasoning:
            parts = [part for part in parts if part.kind != "reasoning"]
        if not self._parsing.parallel:
            parts = [part for part in parts if not part.index]
        self.called = self.called or any(part.kind == "tool" for part in parts)
        return parts


def _merge_parts(parts: Iterable[Part]) -> list[Part]:
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if last is not None and (last.kind, last.index) == (part.kind, part.index) and part.name is None and part.id is None:
            merged[-1] = Part(last.kind, last.text + part.text, last.index, last.id, last.name)
        else:
            merged.append(part)
    return merged
