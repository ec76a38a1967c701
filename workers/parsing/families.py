"""Holds the rules that choose a model's parsers by the marks in its chat template and its `model_type`.

The parser names are vLLM's. A rule holds if the model is of one of its types (any, if there are none) and its template has all
of its marks. The first rule that holds decides; if none holds there is no parser, because a wrong one would spoil good answers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traits:
    """Traits from a model's files: `types` are all its model types, `template` is the text of all its chat templates."""

    types: frozenset[str] = frozenset()
    template: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that chooses `parser`."""

    parser: str
    types: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()

    def holds(self, traits: Traits) -> bool:
        return (not self.types or not traits.types.isdisjoint(self.types)) and all(
            mark in traits.template for mark in self.marks
        )


_GLM = ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "glm4v_moe")
_QWEN_THINKING = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "smollm3")
_GRANITE = ("granite", "granitemoe", "granitemoeshared", "granitemoehybrid")
_HUNYUAN = ("hunyuan_v1_moe", "hunyuan_v1_dense")
_ERNIE = ("ernie4_5", "ernie4_5_moe")
_NEMOTRON = ("nemotron_h", "nemotron_h_moe")

TOOLS = (
    Rule("openai", types=("gpt_oss",)),
    Rule("deepseek_v41", types=("deepseek_v41",)),
    Rule("deepseek_v4", types=("deepseek_v4",)),
    Rule("deepseek_v32", types=("deepseek_v32",)),
    Rule("deepseek_v32", marks=("｜DSML｜",)),
    Rule("deepseek_v3", marks=("<｜tool▁calls▁begin｜>", "```json")),
    Rule("deepseek_v31", marks=("<｜tool▁calls▁begin｜>",)),
    Rule("kimi_k3", types=("kimi_k3",)),
    Rule("kimi_k2", marks=("<|tool_calls_section_begin|>",)),
    Rule("minimax_m3", types=("minimax_m3",)),
    Rule("minimax_m2", marks=("<minimax:tool_call>",)),
    Rule("seed_oss", marks=("<seed:tool_call>",)),
    Rule("longcat", marks=("<longcat_tool_call>",)),
    Rule("step3p5", types=("step3p5",)),
    Rule("step3", marks=("<｜tool_calls_begin｜>",)),
    Rule("mimo", types=("mimo", "mimo_v2", "mimo_v2_flash")),
    Rule("glm47", types=("glm4_moe_lite", "glm_moe_dsa"), marks=("<arg_key>",)),
    Rule("glm45", marks=("<arg_key>", "<tool_call>")),
    Rule("qwen3_coder", marks=("<function=", "<tool_call>")),
    Rule("hunyuan_a13b", types=_HUNYUAN, marks=("<tool_calls>",)),
    Rule("ernie45", types=_ERNIE, marks=("<tool_call>",)),
    Rule("internlm", marks=("<|plugin|>",)),
    Rule("jamba", types=("jamba",), marks=("<tool_calls>",)),
    Rule("granite4", types=_GRANITE, marks=("<tool_call>",)),
    Rule("granite", types=_GRANITE, marks=("<|tool_call|>",)),
    Rule("phi4_mini_json", types=("phi3",), marks=("<|tool|>",)),
    Rule("lfm2", marks=("<|tool_call_start|>",)),
    Rule("olmo3", types=("olmo3",), marks=("<function_calls>",)),
    Rule("cohere_command3", marks=("<|START_ACTION|>",)),
    Rule("gemma4", types=("gemma4",)),
    Rule("functiongemma", marks=("<start_function_call>",)),
    Rule("apertus", marks=("<|tools_prefix|>",)),
    Rule("dots", marks=("<dots_function_call>",)),
    Rule("mistral", marks=("[TOOL_CALLS]",)),
    Rule("llama4_pythonic", types=("llama4",)),
    Rule("llama3_json", types=("llama", "mllama"), marks=("<|python_tag|>",)),
    Rule("llama3_json", types=("llama", "mllama"), marks=('{"name": function name, "parameters": dictionary',)),
    Rule("hermes", marks=("<tool_call>", '"name"', '"arguments"')),
)

REASONING = (
    Rule("openai_gptoss", types=("gpt_oss",)),
    Rule("deepseek_v41", types=("deepseek_v41",)),
    Rule("deepseek_v4", types=("deepseek_v4",)),
    Rule("deepseek_v3", types=("deepseek_v32",)),
    Rule("deepseek_v3", marks=("<｜Assistant｜>", "</think>", "thinking is defined")),
    Rule("deepseek_r1", marks=("<｜Assistant｜>", "</think>")),
    Rule("kimi_k3", types=("kimi_k3",)),
    Rule("kimi_k2", marks=("<|tool_calls_section_begin|>", "</think>")),
    Rule("minimax_m3", types=("minimax_m3",)),
    Rule("minimax_m2", marks=("<minimax:tool_call>", "</think>")),
    Rule("seed_oss", marks=("<seed:think>",)),
    Rule("step3p5", types=("step3p5",)),
    Rule("mimo", types=("mimo", "mimo_v2", "mimo_v2_flash"), marks=("</think>",)),
    Rule("glm45", types=_GLM, marks=("</think>",)),
    Rule("hunyuan_a13b", types=_HUNYUAN, marks=("</think>",)),
    Rule("ernie45", types=_ERNIE, marks=("</think>",)),
    Rule("granite", types=_GRANITE, marks=("Here is my thought process",)),
    Rule("nemotron_v3", types=_NEMOTRON, marks=("</think>",)),
    Rule("olmo3", types=("olmo3",), marks=("<think>",)),
    Rule("cohere_command3", marks=("<|START_THINKING|>",)),
    Rule("gemma4", types=("gemma4",)),
    Rule("mistral", marks=("[THINK]",)),
    Rule("qwen3", types=_QWEN_THINKING, marks=("<think>",)),
    Rule("deepseek_r1", types=("qwen2",), marks=("<think>",)),  # QwQ
)


def first(rules: tuple[Rule, ...], traits: Traits) -> str | None:
    """Return the parser of the first rule that holds, or None."""
    return next((rule.parser for rule in rules if rule.holds(traits)), None)
