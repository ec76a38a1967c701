"""Implements `headrace.workers.parsing.interface` with SGLang's own parsers for tool calls and reasoning.

Forced calls (`required`, a named function) are JSON by a schema and need none of them. A streamed answer is parsed once more as
a whole when it ends, as with vLLM's parsers: what came late is added, a contradiction is counted.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import structlog

from headrace.broker.jobs import OutputParts
from headrace.broker.messages.frames import Part
from headrace.broker.messages.requests import Generation, Parsing
from headrace.workers import metrics
from headrace.workers.engine import Engine, EngineConfig, EngineInfo
from headrace.workers.errors import EngineStartFailed, RequestInvalid
from headrace.workers.parsing.answer import reconcile
from headrace.workers.parsing.builtin import BuiltinParser
from headrace.workers.parsing.interface import ParseRequirements, ParserNames, forced_schema, named_function, stable_call_id
from headrace.workers.parsing.selection import Kind, ParserChoice, Traits, traits_of
from headrace.workers.parsing.stages import NamedCall, Plain, Required, Stage
from headrace.workers.sglang.cpu_plugin import stand_in
from headrace.workers.sglang.settings import SETTINGS, computes_on_cpu, prepare_environment
from headrace.workers.tokens import TokenTable

log = structlog.get_logger()

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
_PROMPT_END = 16  # last tokens of the prompt that are searched for an opening mark


class SglangParserFamily:
    """Implements `headrace.workers.parsing.selection.ParserFamily`."""

    def known(self, model: str) -> ParserNames:
        SETTINGS.check_packages()
        spec = find_spec("sglang")
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        return ParserNames(*(_keys(Path(folders[0]) / path, name) for path, name in _SOURCES.values()))

    def traits(self, model: str, args: Mapping[str, Any]) -> Traits:
        return traits_of(model, args)

    def translate(self, name: str, kind: Kind) -> str:
        return NAMES[kind].get(name, name)

    def check(self, chosen: ParserChoice, model: str, args: Mapping[str, Any]) -> ParserChoice:
        if chosen.tool is None and chosen.reasoning is None:
            return chosen
        _import(model, args)
        tool = self._fitting(chosen, "tool", chosen.tool, lambda: _tool_parser(chosen.tool, []))
        reasoning = self._fitting(chosen, "reasoning", chosen.reasoning, lambda: _reasoning_parser(chosen.reasoning))
        return ParserChoice(tool, reasoning, chosen.guessed)

    def _fitting(self, chosen: ParserChoice, kind: Kind, name: str | None, make: Callable[[], Any]) -> str | None:
        if name is None:
            return None
        try:
            make()
        except Exception as error:
            if kind not in chosen.guessed:
                raise EngineStartFailed(f"SGLang's {kind} parser {name!r} does not work here: {error}") from error
            log.warning("parsers.do_not_fit", kind=kind, parser=name, error=str(error))
            return None
        return name

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

    def plan(self, parsing: Parsing, generation: Generation, prompt_ids: Sequence[int]) -> SglangPlan:
        calls = bool(parsing.tools) and parsing.choice == "auto"
        if calls and self.tool is None:
            raise RequestInvalid("this worker has no tool parser, so the model cannot choose its tools", param="tool_choice")
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
        end = b"".join(self._table.token_bytes(token) for token in prompt_ids[-_PROMPT_END:]).decode(errors="replace")
        return SglangPlan(self, parsing, requirements, prompt_end=end)


class SglangPlan:
    """Implements `headrace.workers.parsing.interface.ParsePlan`."""

    def __init__(self, parsers: SglangParsers, parsing: Parsing, requirements: ParseRequirements, *, prompt_end: str) -> None:
        self.requirements = requirements
        self._parsers, self._parsing, self._prompt_end = parsers, parsing, prompt_end

    def parser(self, request_id: str, choice: int) -> BuiltinParser:
        def new_id(index: int) -> str:
            return stable_call_id(None, request_id, choice, index)

        parsing, tool = self._parsing, self._parsers.tool
        stage: Stage
        name = named_function(parsing)
        if name is not None:
            stage = NamedCall(new_id, name)
        elif parsing.tools and parsing.choice == "required":
            stage = Required(new_id)
        elif parsing.tools and parsing.choice == "auto":
            stage = ToolStage(ToolParsers(tool, parsing.tools), new_id)
        else:
            stage = Plain()
        if self._parsers.reasoning is not None:
            stage = ReasoningStage(self._reasoning(), stage)
        return BuiltinParser(stage, parsing)

    def _reasoning(self) -> Any:
        made = _reasoning_parser(self._parsers.reasoning)
        mark = str(getattr(made.detector, "think_start_token", None) or "")
        opened = bool(mark) and self._prompt_end.rstrip().endswith(mark.rstrip())
        return _reasoning_parser(self._parsers.reasoning, opened=True) if opened else made


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
        return self._parts(*self._parser.parse_stream_end()) + self._rest()

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

    def _rest(self) -> list[Part]:
        """Return what the whole answer has and its streamed pieces had not, and count how both compare."""
        whole = OutputParts()
        try:
            content, calls = self._family.fresh().parse_non_stream("".join(self._text))
        except Exception as error:  # the client has its answer already
            metrics.PARSED.labels("differs").inc()
            log.warning("parser.whole_failed", error=repr(error))
            return []
        whole.content = content or ""
        for index, call in enumerate(calls):
            whole.add([Part("tool", call.parameters or "", index, self._new_id(index), call.name)])
        outcome, missing = reconcile(self._said, whole)
        metrics.PARSED.labels(outcome).inc()
        if outcome == "differs":
            log.info("parser.streamed_differs", calls=[len(self._said.calls), len(whole.calls)])
        return missing
