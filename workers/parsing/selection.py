"""Chooses a worker's parsers before the model is loaded: by the configured names, or by the model's files."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import structlog

from headrace.workers.engine import Engine, EngineInfo
from headrace.workers.errors import EngineStartFailed
from headrace.workers.parsing.families import REASONING, TOOLS, Traits, first
from headrace.workers.parsing.interface import ParserNames, ParserSet
from headrace.workers.text.tokens import TokenTable

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
        """Return this family's name for a parser that a rule of `headrace.workers.parsing.families` names."""

    def check(self, chosen: ParserChoice, model: str, args: Mapping[str, Any]) -> ParserChoice:
        """Try the parsers on the model's tokenizer, and drop guessed ones that do not work with it.

        May take seconds. Raises EngineStartFailed for a parser that the settings name and that does not work.
        """

    def build(self, engine: Engine, info: EngineInfo, table: TokenTable, chosen: ParserChoice) -> ParserSet:
        """Build the parsers for the started engine."""


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
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" (close to it: {close[0]})" if close else ""
    raise EngineStartFailed(f"there is no {kind} parser {name!r}{hint}; known: auto, none, {', '.join(known)}")


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
