from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.broker.messages.frames import Part
from headrace.workers.errors import EngineStartFailed
from headrace.workers.parsing.selection import REASONING, TOOLS
from headrace.workers.parsing.stages import Plain
from headrace.workers.sglang.parsing import NAMES, ReasoningStage, SglangParserFamily, ToolStage, _keys


def test_names_are_read_from_the_source_without_importing_it(tmp_path: Path) -> None:
    source = tmp_path / "parser.py"
    source.write_text('import nothing_like_it\nclass Parser:\n    Names: dict[str, type] = {"a": int, "b-c": str}\n')
    assert _keys(source, "Names") == ("a", "b-c")
    with pytest.raises(EngineStartFailed, match="Others"):
        _keys(source, "Others")
    with pytest.raises(EngineStartFailed, match=r"absent\.py"):
        _keys(tmp_path / "absent.py", "Names")


def test_the_table_of_names_begins_with_names_that_rules_use() -> None:
    assert NAMES["tool"].keys() <= {rule.parser for rule in TOOLS}
    assert NAMES["reasoning"].keys() <= {rule.parser for rule in REASONING}


def test_one_family_may_have_two_names() -> None:
    family = SglangParserFamily()
    assert family.translate("deepseek_v3", "tool") == "deepseekv3"
    assert family.translate("deepseek_v3", "reasoning") == "deepseek-v3"
    assert family.translate("hermes", "tool") == "hermes"


def call(index: int, name: str | None, parameters: str) -> Any:
    return SimpleNamespace(tool_index=index, name=name, parameters=parameters)


class Tools:
    """A stand-in for SGLang's tool parser: streamed it forgets the end of the arguments."""

    name = "stand-in"

    def fresh(self) -> Tools:
        return self

    def parse_stream_chunk(self, text: str) -> tuple[str, list[Any]]:
        return {"Hi": ("Hi", []), "<c>": ("", [call(0, "f", "")]), '{"a"': ("", [call(0, None, '{"a"')])}.get(text, ("", []))

    def parse_stream_end(self) -> tuple[str, list[Any]]:
        return "", []

    def parse_non_stream(self, text: str) -> tuple[str, list[Any]]:
        return "Hi", [call(0, "f", '{"a": 1}')]


def test_streamed_calls_are_completed_by_the_whole_answer() -> None:
    stage = ToolStage(cast("Any", Tools()), "call_{}".format)
    parts = [part for text in ("Hi", "<c>", '{"a"', ": 1}") for part in stage.push(text)]
    assert parts == [Part("content", "Hi"), Part("tool", "", 0, "call_0", "f"), Part("tool", '{"a"', 0)]
    assert stage.finish() == [Part("tool", ": 1}", 0)]


class Reasoning:
    """A stand-in for SGLang's reasoning parser."""

    def parse_stream_chunk(self, text: str) -> tuple[str | None, str | None]:
        return (text, None) if text.islower() else (None, text)

    def parse_stream_end(self) -> tuple[str | None, str | None]:
        return None, "REST"


def test_reasoning_comes_first_and_content_goes_on_to_the_next_stage() -> None:
    stage = ReasoningStage(Reasoning(), Plain())
    assert stage.push("hm") == [Part("reasoning", "hm")]
    assert stage.push("YES") == [Part("content", "YES")]
    assert stage.finish() == [Part("content", "REST")]
