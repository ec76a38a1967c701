"""Implements `headrace.workers.parsing.interface` with SGLang's own parsers for tool calls and reasoning.

Forced calls (`required`, a named function) are JSON by a schema and need none of them. A streamed answer is parsed once more as
a whole when it ends, as with vLLM's parsers: what came late is added, a contradiction is counted.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.broker.jobs import OutputParts
from headrace.broker.messages.frames import Part
from headrace.broker.messages.requests import Generation, Parsing
from headrace.workers.engine import Engine, EngineConfig, EngineInfo
from headrace.workers.engine_settings import package_folder
from headrace.workers.errors import EngineStartFailed, RequestInvalid
from headrace.workers.parsing.builtin import StagePlan
from headrace.workers.parsing.interface import (
    PROMPT_END,
    ParseRequirements,
    ParserNames,
    check_chosen_tools,
    completion,
    forced_schema,
)
from headrace.workers.parsing.selection import EngineParserFamily, Kind, ParserChoice
from headrace.workers.parsing.stages import NewId, Stage
from headrace.workers.sglang.cpu_plugin import stand_in
from headrace.workers.sglang.settings import SETTINGS, computes_on_cpu, prepare_environment
from headrace.workers.tokens import TokenTable

NAMES: Mapping[Kind, Mapping[str, str]] = {
    "tool": {
        "apertus": "apertus2509",
        "deepseek_v3": "deepseekv3",
        "deepseek_v31": "deepseekv31",
        "deepseek_v32": "deepseekv32",
        "deepseek_v4": "deepseekv4",
        "deepseek_v41": "deepseekv41",
        "hunyuan_a13b": "hunyuan",
        "internlm": "interns1",
        "llama3_json": "llama3",
        "llama4_pythonic": "pythonic",
        "minimax_m2": "minimax-m2",
        "minimax_m3": "minimax-m3",
        "openai": "gpt-oss",
    },
    "reasoning": {
        "deepseek_r1": "deepseek-r1",
        "deepseek_v3": "deepseek-v3",
        "deepseek_v4": "deepseek-v4",
        "deepseek_v41": "deepseek-v41",
        "granite": "granite_thinking_parser",
        "hunyuan_a13b": "hunyuan",
        "minimax_m2": "minimax",
        "minimax_m3": "minimax-m3",
        "nemotron_v3": "nemotron_3",
        "openai_gptoss": "gpt-oss",
    },
}
"""vLLM's names, which the rules for model families use, where SGLang has another one for the same family."""

_SOURCES = {
    "tool": ("srt/function_call/function_call_parser.py", "ToolCallParserEnum"),
    "reasoning": ("srt/parser/reasoning_parser.py", "DetectorMap"),
}


class SglangParserFamily(EngineParserFamily):
    """Implements `headrace.workers.parsing.selection.ParserFamily`."""

    ENGINE = "SGLang"

    def known(self, model: str) -> ParserNames:
        SETTINGS.check_packages()
        folder = package_folder("sglang") or Path()
        return ParserNames(*(_keys(folder / path, name) for path, name in _SOURCES.values()))

    def translate(self, name: str, kind: Kind) -> str:
        return NAMES[kind].get(name, name)

    def check(self, chosen: ParserChoice, model: str, args: Mapping[str, Any]) -> ParserChoice:
        if chosen.tool is None and chosen.reasoning is None:
            return chosen
        _import(model, args)
        tool = self._fitting(chosen, "tool", lambda name: _tool_parser(name, []))
        reasoning = self._fitting(chosen, "reasoning", _reasoning_parser)
        return ParserChoice(tool, reasoning, chosen.guessed)

    def build(self, engine: Engine, info: EngineInfo, table: TokenTable, chosen: ParserChoice) -> SglangParsers:
        return SglangParsers(table, tool=chosen.tool, reasoning=chosen.reasoning)


def _keys(source: Path, name: str) -> tuple[str, ...]:
    """Return the keys of the dict that a class of this file binds to `name`: importing SGLang for them takes ten seconds."""
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError) as error:
        raise EngineStartFailed(f"SGLang's parsers cannot be listed from {source}: {error}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            keys = node.value.keys if isinstance(node.value, ast.Dict) else []
            return tuple(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
    raise EngineStartFailed(f"SGLang's parsers cannot be listed: {source} has no {name}")


def _import(model: str, args: Mapping[str, Any]) -> None:
    try:
        import torch

        cpu = computes_on_cpu(args, gpu=torch.cuda.is_available())
        prepare_environment(EngineConfig(model=model, served_name=model), os.environ, cpu=cpu)
        if cpu:
            stand_in()
        import sglang.srt.function_call.function_call_parser
        import sglang.srt.parser.reasoning_parser  # noqa: F401 # later uses are inside functions
    except ImportError as error:
        raise EngineStartFailed(f"SGLang is not installed or broken: {error}") from error


def _tool_parser(name: str | None, tools: Sequence[Mapping[str, Any]]) -> Any:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    return FunctionCallParser([Tool.model_validate(tool) for tool in tools], name)


def _reasoning_parser(name: str | None, *, opened: bool = False) -> Any:
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    return ReasoningParser(name, stream_reasoning=True, force_reasoning=True if opened else None)


class SglangParsers:
    """Implements `headrace.workers.parsing.interface.ParserSet`."""

    def __init__(self, table: TokenTable, *, tool: str | None, reasoning: str | None) -> None:
        self.tool, self.reasoning = tool, reasoning
        self._table = table

    def plan(self, parsing: Parsing, generation: Generation, prompt_ids: Sequence[int]) -> StagePlan:
        check_chosen_tools(parsing, self.tool)
        calls = bool(parsing.tools) and parsing.choice == "auto"
        schema = forced_schema(parsing)
        try:
            if calls:
                _tool_parser(self.tool, parsing.tools)
        except (ValueError, TypeError) as error:
            raise RequestInvalid(f"SGLang refuses the tools: {str(error)[:500]}", param="tools") from error
        parsed = calls or self.reasoning is not None
        requirements = ParseRequirements(
            guided=generation.guided if schema is None else {"json": schema},
            skip_special_tokens=generation.skip_special_tokens and not parsed,
            reasoning_ended=None if self.reasoning is None else False,
        )

        def tools(new_id: NewId) -> Stage:
            return ToolStage(ToolParsers(self.tool, parsing.tools), new_id)

        if self.reasoning is None:
            return StagePlan(parsing, requirements, tools=tools)
        end = b"".join(self._table.token_bytes(token) for token in prompt_ids[-PROMPT_END:]).decode(errors="replace")
        return StagePlan(
            parsing, requirements, tools=tools, reasoning=lambda following: ReasoningStage(self._thinking(end), following)
        )

    def _thinking(self, prompt_end: str) -> Any:
        made = _reasoning_parser(self.reasoning)
        mark = str(getattr(made.detector, "think_start_token", None) or "")
        opened = bool(mark) and prompt_end.rstrip().endswith(mark.rstrip())
        return _reasoning_parser(self.reasoning, opened=True) if opened else made


class ReasoningStage:
    """Separates the reasoning with SGLang's parser; content goes to the following stage."""

    def __init__(self, parser: Any, following: Stage) -> None:
        self._parser = parser
        self._following = following

    def push(self, text: str) -> list[Part]:
        return self._parts(*self._parser.parse_stream_chunk(text))

    def finish(self) -> list[Part]:
        return self._parts(*self._parser.parse_stream_end()) + self._following.finish()

    def _parts(self, reasoning: str | None, content: str | None) -> list[Part]:
        parts = [Part("reasoning", reasoning)] if reasoning else []
        return parts + (self._following.push(content) if content else [])


@dataclass(frozen=True, slots=True)
class ToolParsers:
    """SGLang's parser of this name for these tools."""

    name: str | None
    tools: Sequence[Mapping[str, Any]]

    def fresh(self) -> Any:
        """Create a parser for one answer, or for one answer as a whole."""
        return _tool_parser(self.name, self.tools)


class ToolStage:
    """Takes tool calls out of the content with SGLang's parser."""

    def __init__(self, family: ToolParsers, new_id: Callable[[int], str]) -> None:
        self._family = family
        self._parser = family.fresh()
        self._new_id = new_id
        self._text: list[str] = []
        self._said = OutputParts()
        self._named: set[int] = set()

    def push(self, text: str) -> list[Part]:
        self._text.append(text)
        return self._parts(*self._parser.parse_stream_chunk(text))

    def finish(self) -> list[Part]:
        return self._parts(*self._parser.parse_stream_end()) + completion(self._said, self._whole, parser=self._family.name)

    def _parts(self, content: str, calls: Sequence[Any]) -> list[Part]:
        parts = [Part("content", content)] if content else []
        for call in calls:
            index = call.tool_index
            name = call.name if call.name and index not in self._named else None
            if name is None and index not in self._named:
                continue  # arguments of a call without a name cannot be told
            if name is None and not call.parameters:
                continue
            self._named.add(index)
            parts.append(Part("tool", call.parameters or "", index, self._new_id(index) if name else None, name))
        if parts:
            self._said.add(parts)
        return parts

    def _whole(self) -> OutputParts:
        whole = OutputParts()
        content, calls = self._family.fresh().parse_non_stream("".join(self._text))
        whole.content = content or ""
        for index, call in enumerate(calls):
            whole.add([Part("tool", call.parameters or "", index, self._new_id(index), call.name)])
        return whole
