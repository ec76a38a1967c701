"""SGLang's own parsers, streamed one token at a time and whole, behind the interface of all parsers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.jobs import OutputParts
from headrace.broker.messages.requests import Generation, Parsing
from headrace.workers.parsing.selection import REASONING, TOOLS, ParserChoice
from headrace.workers.sglang.parsing import NAMES, SglangParserFamily, SglangParsers
from headrace.workers.tokens import token_table

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed: make install ENGINE=sglang"),
]

TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def family(model_dir: Path) -> SglangParserFamily:
    made = SglangParserFamily()
    assert made.check(ParserChoice("hermes", "qwen3"), str(model_dir), {}) == ParserChoice("hermes", "qwen3")
    return made


def read(parsers: SglangParsers, tokenizer: Any, answer: str, *, whole: bool = False, prompt: str = "") -> OutputParts:
    parsing = Parsing(tools=[TOOL], choice="auto", whole=whole, reasoning=True, parallel=True)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    plan = parsers.plan(parsing, Generation(token_ids=b""), prompt_ids)
    assert not plan.requirements.skip_special_tokens
    parser = plan.parser("r", 0)
    said = OutputParts()
    for token in tokenizer.encode(answer, add_special_tokens=False).ids:
        said.add(parser.push(token, tokenizer.decode([token], skip_special_tokens=False)))
    said.add(parser.finish(None, ""))
    return said


@pytest.mark.parametrize("tool", ["hermes", "qwen25"])
@pytest.mark.parametrize("whole", [False, True])
def test_calls_and_reasoning_are_taken_out(
    family: SglangParserFamily, model_dir: Path, tokenizer: Any, tool: str, whole: bool
) -> None:
    parsers = SglangParsers(token_table(str(model_dir)), tool=tool, reasoning="qwen3")
    said = read(parsers, tokenizer, f"<think>It asks.</think>{CALL}", whole=whole)
    assert said.reasoning.strip() == "It asks."
    assert said.content.strip() == ""
    assert [(call.name, call.arguments.replace(" ", "")) for call in said.calls] == [("weather", '{"city":"Rome"}')]
    assert said.calls[0].id


def test_reasoning_that_the_prompt_has_opened_is_reasoning(family: SglangParserFamily, model_dir: Path, tokenizer: Any) -> None:
    parsers = SglangParsers(token_table(str(model_dir)), tool="hermes", reasoning="deepseek-r1")
    said = read(parsers, tokenizer, "It asks.</think>Rome.", prompt="<think>\n")
    assert (said.reasoning.strip(), said.content.strip()) == ("It asks.", "Rome.")


def test_every_name_of_the_table_is_one_of_sglangs(family: SglangParserFamily, model_dir: Path) -> None:
    known = family.known(str(model_dir))
    assert set(NAMES["tool"].values()) <= set(known.tools)
    assert set(NAMES["reasoning"].values()) <= set(known.reasoning)
    assert len(known.tools) > 40
    assert len(known.reasoning) > 30
    reached = [rule.parser for rule in (*TOOLS, *REASONING)]
    assert "hermes" in reached
