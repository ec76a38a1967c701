"""Chooses a worker's parsers before the model is loaded: by the configured names, or by the model's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import msgspec
import structlog

from headrace.workers.engine import Engine, EngineInfo
from headrace.workers.engine_settings import spelt_like
from headrace.workers.errors import EngineStartFailed
from headrace.workers.parsing.interface import ParserNames, ParserSet
from headrace.workers.tokens import TokenTable

# Holds the rules that choose a model's parsers by the marks in its chat template and its `model_type`.
#
# The parser names are vLLM's. A rule holds if the model is of one of its types (any, if there are none) and its template has
# all of its marks. The first rule that holds decides; if none holds there is no parser, because a wrong one would spoil good
# answers.


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


log = structlog.get_logger()

AUTO, NONE = "auto", "none"
TRAIT_FILES = ("config.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")

Kind = Literal["tool", "reasoning"]


@dataclass(frozen=True, slots=True)
class ParserChoice:
    """The chosen parsers, None = none. `guessed` are the kinds whose parser the settings do not name."""

    tool: str | None = None
    reasoning: str | None = None
    guessed: frozenset[Kind] = frozenset()


class ParserFamily(Protocol):
    """The parsers that a kind of engine provides."""

    def known(self, model: str) -> ParserNames:
        """Return the known names. May take seconds: call it in a thread. Raises EngineStartFailed."""

    def traits(self, model: str, args: Mapping[str, Any]) -> Traits:
        """Return the traits in the model's files."""

    def translate(self, name: str, kind: Kind) -> str:
        """Return this family's name for a parser that a rule of `headrace.workers.parsing.selection` names."""

    def check(self, chosen: ParserChoice, model: str, args: Mapping[str, Any]) -> ParserChoice:
        """Try the parsers on the model's tokenizer, and drop guessed ones that do not work with it.

        May take seconds. Raises EngineStartFailed for a parser that the settings name and that does not work.
        """

    def build(self, engine: Engine, info: EngineInfo, table: TokenTable, chosen: ParserChoice) -> ParserSet:
        """Build the parsers for the started engine."""


class EngineParserFamily:
    """The common part of the families of engines: the model's own files, the names of vLLM, and the trial of a parser."""

    ENGINE: ClassVar[str]

    def traits(self, model: str, args: Mapping[str, Any]) -> Traits:
        return traits_of(model, args)

    def translate(self, name: str, kind: Kind) -> str:
        return name

    def _fitting(self, chosen: ParserChoice, kind: Kind, make: Callable[[str], Any]) -> str | None:
        """Return the chosen parser, None for a guessed one that cannot be made. Raises EngineStartFailed for a named one."""
        name = chosen.tool if kind == "tool" else chosen.reasoning
        if name is None:
            return None
        try:
            make(name)
        except Exception as error:
            if kind not in chosen.guessed:
                raise EngineStartFailed(f"{self.ENGINE}'s {kind} parser {name!r} does not work here: {error}") from error
            log.warning("parsers.do_not_fit", kind=kind, parser=name, error=str(error))
            return None
        return name


def choose(family: ParserFamily, *, tool: str, reasoning: str, model: str, args: Mapping[str, Any]) -> ParserChoice:
    """Choose the parsers. `tool` and `reasoning` are settings; `args` are the engine's own. May take seconds: use a thread.

    Raises EngineStartFailed for an unknown name, with the known ones.
    """
    own = args.get("reasoning_parser")  # vLLM's own setting of the same meaning
    if own:
        if reasoning not in (AUTO, own):
            raise EngineStartFailed(f"the reasoning parser is {reasoning!r} and, among the engine's settings, {own!r}")
        reasoning = str(own)
    if (tool, reasoning) == (NONE, NONE) or args.get("runner") == "pooling" or args.get("is_embedding"):
        return ParserChoice()
    known = family.known(model)
    _check_name("tool", tool, known.tools)
    _check_name("reasoning", reasoning, known.reasoning)
    traits = family.traits(model, args) if AUTO in (tool, reasoning) else Traits()
    guessed: set[Kind] = set()
    if tool == AUTO:
        guessed.add("tool")
    if reasoning == AUTO:
        guessed.add("reasoning")
    chosen = ParserChoice(
        _resolve("tool", tool, traits, known.tools, family),
        _resolve("reasoning", reasoning, traits, known.reasoning, family),
        frozenset(guessed),
    )
    chosen = family.check(chosen, model, args)
    log.info("parsers.chosen", tool=chosen.tool, reasoning=chosen.reasoning, guessed=sorted(guessed))
    return chosen


def _check_name(kind: Kind, name: str, known: tuple[str, ...]) -> None:
    if name in (AUTO, NONE) or name in known:
        return
    told = f"there is no {kind} parser {name!r}{spelt_like(name, known)}; known: auto, none, {', '.join(known)}"
    raise EngineStartFailed(told)


def _resolve(kind: Kind, name: str, traits: Traits, known: tuple[str, ...], family: ParserFamily) -> str | None:
    if name == NONE:
        return None
    if name != AUTO:
        return name
    guess = first(TOOLS if kind == "tool" else REASONING, traits)
    own = family.translate(guess, kind) if guess is not None else None
    if own is not None and own not in known:
        log.warning(
            "parsers.unknown_family", parser=guess, meaning="this engine does not bring the parser of this model family"
        )
        return None
    return own


def traits_of(model: str, args: Mapping[str, Any]) -> Traits:
    """Read the traits in a model's files. A model that is not a folder is fetched from the hub, like its other files later."""
    tokenizer = str(args.get("tokenizer") or model)
    config = _json(_file(model, "config.json", args))
    types = [config.get("model_type")]
    types += [part.get("model_type") for part in config.values() if isinstance(part, dict)]
    templates = [_file(tokenizer, "chat_template.jinja", args) or b""]
    for name in ("tokenizer_config.json", "chat_template.json"):
        templates += _templates(_json(_file(tokenizer, name, args)).get("chat_template"))
    text = "\n".join(template.decode(errors="replace") for template in templates)
    return Traits(frozenset(name for name in types if isinstance(name, str)), text)


def _templates(value: object) -> list[bytes]:
    """Return the templates of a config value: one template, or several with names."""
    if isinstance(value, str):
        return [value.encode()]
    if not isinstance(value, list):
        return []
    return [str(named.get("template", "")).encode() for named in value if isinstance(named, dict)]


def _json(data: bytes | None) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(data or b"{}")
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _file(model: str, name: str, args: Mapping[str, Any]) -> bytes | None:
    folder = Path(model)
    if not folder.is_dir():
        return _from_hub(model, name, args)
    try:
        return (folder / name).read_bytes()
    except OSError:
        return None


def _from_hub(model: str, name: str, args: Mapping[str, Any]) -> bytes | None:
    """Fetch a file that the engine would fetch anyway. Returns None on failure: the engine reports a missing model."""
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(model, name, revision=args.get("revision"))).read_bytes()
    except Exception as error:
        log.debug("parsers.no_file", model=model, file=name, error=repr(error))
        return None
