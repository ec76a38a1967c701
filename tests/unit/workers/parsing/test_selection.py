"""Which parsers a worker uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.workers.errors import EngineStartFailed
from headrace.workers.parsing.builtin import BuiltinParserFamily
from headrace.workers.parsing.interface import ParserNames
from headrace.workers.parsing.selection import REASONING, TOOLS, Kind, ParserChoice, Traits, choose, first, traits_of

TEMPLATES = Path(__file__).parents[3] / "support" / "chat_templates"

# template of a real model → its model_type, and the parsers it needs
FAMILIES = {
    "apertus": ("apertus", "apertus", None),
    "deepseek-r1-distill-qwen": ("qwen2", "deepseek_v3", "deepseek_r1"),
    "deepseek-v3.1": ("deepseek_v3", "deepseek_v31", "deepseek_v3"),
    "glm-4.6": ("glm4_moe", "glm45", "glm45"),
    "gpt-oss": ("gpt_oss", "openai", "openai_gptoss"),
    "granite-3.3": ("granite", "granite", None),
    "granite-4.0": ("granitemoehybrid", "granite4", None),
    "kimi-k2": ("kimi_k2", "kimi_k2", None),
    "ministral-3-reasoning": ("mistral3", "mistral", "mistral"),
    "mistral-nemo": ("mistral", "mistral", None),
    "phi-3.5": ("phi3", None, None),
    "qwen2.5": ("qwen2", "hermes", None),
    "qwen3": ("qwen3", "hermes", "qwen3"),
    "qwen3-coder": ("qwen3_moe", "qwen3_coder", None),
    "qwq": ("qwen2", "hermes", "deepseek_r1"),
    "seed-oss": ("seed_oss", "seed_oss", "seed_oss"),
    "smollm2": ("llama", None, None),
}


class Paper(BuiltinParserFamily):
    """Knows two of each kind."""

    def __init__(self, traits: Traits) -> None:
        self._traits = traits
        self.asked: list[str] = []

    def known(self, model: str) -> ParserNames:
        return ParserNames(("hermes", "mistral"), ("qwen3", "mistral"))

    def traits(self, model: str, args: Any) -> Traits:
        self.asked.append(model)
        return self._traits

    def translate(self, name: str, kind: Kind) -> str:
        return name


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_family_is_told_by_template_and_type(name: str) -> None:
    model_type, tool, reasoning = FAMILIES[name]
    template = TEMPLATES / name / "chat_template.jinja"
    traits = Traits(frozenset({model_type}), template.read_text() if template.is_file() else "")
    assert (first(TOOLS, traits), first(REASONING, traits)) == (tool, reasoning)


@pytest.mark.parametrize(
    ("model_type", "marks", "tool"),
    [
        ("llama", "<|python_tag|>", "llama3_json"),
        ("opt", "<|python_tag|>", None),
        ("llama4", "", "llama4_pythonic"),
        ("minimax_m2", "<minimax:tool_call>", "minimax_m2"),
        ("jamba", "<tool_calls>", "jamba"),
        ("cohere2", "<|START_ACTION|>", "cohere_command3"),
        ("lfm2", "<|tool_call_start|>", "lfm2"),
        ("nemotron_h", "<tool_call><function=", "qwen3_coder"),
    ],
)
def test_marks_count_only_for_the_families_that_mean_them(model_type: str, marks: str, tool: str | None) -> None:
    assert first(TOOLS, Traits(frozenset({model_type}), marks)) == tool


def test_files_of_a_model_are_read_wherever_they_keep_their_template(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "outer", "text_config": {"model_type": "inner"}}))
    templates = [{"name": "default", "template": "ONE"}, {"name": "tool_use", "template": "TWO"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    (tmp_path / "chat_template.jinja").write_text("THREE")
    traits = traits_of(str(tmp_path), {})
    assert traits.types == {"outer", "inner"}
    assert all(text in traits.template for text in ("ONE", "TWO", "THREE"))


def test_damaged_files_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    assert traits_of(str(tmp_path), {}) == Traits()


def test_what_is_named_is_used_and_auto_asks_the_model() -> None:
    brand = Paper(Traits(frozenset({"mistral"}), "[TOOL_CALLS]"))
    assert choose(brand, tool="auto", reasoning="qwen3", model="m", args={}) == ParserChoice(
        "mistral", "qwen3", frozenset({"tool"})
    )
    assert brand.asked == ["m"]


def test_none_asks_nobody() -> None:
    brand = Paper(Traits(frozenset({"mistral"}), "[TOOL_CALLS]"))
    assert choose(brand, tool="none", reasoning="none", model="m", args={}) == ParserChoice()
    assert brand.asked == []


def test_a_family_that_the_engine_does_not_know_has_no_parser() -> None:
    chosen = choose(Paper(Traits(frozenset({"gpt_oss"}))), tool="auto", reasoning="auto", model="m", args={})
    assert (chosen.tool, chosen.reasoning) == (None, None)


@pytest.mark.parametrize(("tool", "reasoning", "kind"), [("hermse", "auto", "tool"), ("auto", "qwen", "reasoning")])
def test_a_wrong_name_is_refused_with_the_right_ones(tool: str, reasoning: str, kind: str) -> None:
    with pytest.raises(EngineStartFailed) as refused:
        choose(Paper(Traits()), tool=tool, reasoning=reasoning, model="m", args={})
    message = str(refused.value)
    assert f"no {kind} parser" in message
    assert "close to it: " in message
    assert "auto, none, " + ("hermes, mistral" if kind == "tool" else "qwen3, mistral") in message


def test_the_engines_own_setting_counts_and_must_not_contradict() -> None:
    own = {"reasoning_parser": "qwen3"}
    assert choose(Paper(Traits()), tool="none", reasoning="auto", model="m", args=own).reasoning == "qwen3"
    with pytest.raises(EngineStartFailed, match=r"'mistral'.*'qwen3'"):
        choose(Paper(Traits()), tool="none", reasoning="mistral", model="m", args=own)


def test_a_model_that_makes_vectors_has_no_parsers() -> None:
    brand = Paper(Traits(frozenset({"mistral"}), "[TOOL_CALLS]"))
    assert choose(brand, tool="auto", reasoning="auto", model="m", args={"runner": "pooling"}) == ParserChoice()


def test_the_simulator_has_parsers_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "chat_template.jinja").write_text((TEMPLATES / "qwen3" / "chat_template.jinja").read_text())
    chosen = choose(BuiltinParserFamily(), tool="auto", reasoning="auto", model="sim", args={"tokenizer_dir": str(tmp_path)})
    assert (chosen.tool, chosen.reasoning) == ("hermes", "think")
    assert choose(BuiltinParserFamily(), tool="auto", reasoning="auto", model="sim", args={}).tool is None


def test_every_rule_names_something() -> None:
    assert all(rule.types or rule.marks for rule in (*TOOLS, *REASONING))
