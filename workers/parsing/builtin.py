"""The parsers that need no engine: for the simulator, and the yardstick for the seam to the engines' own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.broker.messages import Generation, Parsing, Part
from headrace.workers.engine import Engine, EngineInfo
from headrace.workers.errors import RequestInvalid
from headrace.workers.parsing.call_ids import settled_id
from headrace.workers.parsing.families import Traits
from headrace.workers.parsing.interface import Asked, Known, named_function
from headrace.workers.parsing.schema import forced_schema
from headrace.workers.parsing.selection import Chosen, traits_of
from headrace.workers.parsing.stages import Hermes, Named, Plain, Required, Stage, Think
from headrace.workers.parsing.text_pieces import joined
from headrace.workers.text.tokens import TokenTable

BUNDLED_TOKENIZER = Path(__file__).resolve().parents[1] / "assets" / "smollm2"
KNOWN = Known(tools=("hermes",), reasoning=("think",))

_LIKE = {  # families whose marks are the same
    "qwen3": "think",
    "deepseek_r1": "think",
    "deepseek_v3": "think",
    "glm45": "think",
    "kimi_k2": "think",
    "nemotron_v3": "think",
}

_PROMPT_END = 16  # tokens of the prompt that are looked at for an opening mark


class BuiltinParsers:
    """`tool` and `reasoning` are of `KNOWN`, or None."""

    def __init__(self, table: TokenTable, *, tool: str | None = None, reasoning: str | None = None) -> None:
        self.tool, self.reasoning = tool, reasoning
        self._table = table

    def plan(self, parsing: Parsing, generation: Generation, prompt_ids: Sequence[int]) -> BuiltinPlan:
        if parsing.tools and parsing.choice == "auto" and self.tool is None:
            raise RequestInvalid("this worker has no tool parser, so the model cannot choose its tools", param="tool_choice")
        schema = forced_schema(parsing)
        asked = Asked(
            guided=generation.guided if schema is None else {"json": schema},
            skip_special_tokens=generation.skip_special_tokens and self.tool is None and self.reasoning is None,
        )
        return BuiltinPlan(self, parsing, asked, opened=self._opened(prompt_ids))

    def _opened(self, prompt_ids: Sequence[int]) -> bool:
        """The prompt ends with an opening mark."""
        if self.reasoning is None:
            return False
        end = b"".join(self._table.token_bytes(token) for token in prompt_ids[-_PROMPT_END:])
        return end.rstrip().endswith(Think.OPEN.encode())


class BuiltinBrand:
    """See `headrace.workers.parsing.selection.ParserFamily`."""

    def known(self, model: str) -> Known:
        return KNOWN

    def traits(self, model: str, args: Mapping[str, Any]) -> Traits:
        folder = str(args.get("tokenizer_dir") or BUNDLED_TOKENIZER)
        return traits_of(folder, {})

    def translate(self, name: str) -> str:
        return _LIKE.get(name, name)

    def check(self, chosen: Chosen, model: str, args: Mapping[str, Any]) -> Chosen:
        return chosen

    def build(self, engine: Engine, info: EngineInfo, table: TokenTable, chosen: Chosen) -> BuiltinParsers:
        return BuiltinParsers(table, tool=chosen.tool, reasoning=chosen.reasoning)


class BuiltinPlan:
    """See `headrace.workers.parsing.interface.ParsePlan`."""

    def __init__(self, parsers: BuiltinParsers, parsing: Parsing, asked: Asked, *, opened: bool) -> None:
        self.asked = asked
        self._parsers, self._parsing, self._opened = parsers, parsing, opened

    def parser(self, request_id: str, choice: int) -> BuiltinParser:
        def new_id(index: int) -> str:
            return settled_id(None, request_id, choice, index)

        parsing = self._parsing
        stage: Stage
        name = named_function(parsing)
        if name is not None:
            stage = Named(new_id, name)
        elif parsing.tools and parsing.choice == "required":
            stage = Required(new_id)
        elif parsing.tools and parsing.choice == "auto":
            stage = Hermes(new_id)
        else:
            stage = Plain()
        if self._parsers.reasoning is not None:
            stage = Think(stage, opened=self._opened)
        return BuiltinParser(stage, parsing)


class BuiltinParser:
    """One answer. See `headrace.workers.parsing.interface.AnswerParser`."""

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
        return joined(self._kept + parts) if self._parsing.whole else parts

    def reasoning_tokens(self) -> int:
        return self._reasoning_tokens

    def _shown(self, parts: list[Part]) -> list[Part]:
        if not self._parsing.reasoning:
            parts = [part for part in parts if part.kind != "reasoning"]
        if not self._parsing.parallel:
            parts = [part for part in parts if not part.index]
        self.called = self.called or any(part.kind == "tool" for part in parts)
        return parts
