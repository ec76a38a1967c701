"""Common parts of engine adapters: declared support, LoRA settings, checks of arguments, ports, and NIXL's pace.

A started engine declares what it can do as it was started (`Engine.capabilities`). `EngineSupport` is the union over all
configurations: the support table of the documentation is made from it, and the engine contract tests
(tests/engine_contract) compare both with what the engine does.
"""

from __future__ import annotations

import ast
import json
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from headrace.workers.engine import Capabilities, DisaggStyle, EngineConfig, Sequence
from headrace.workers.errors import EngineError, EngineStartFailed, RequestInvalid, UnsupportedByEngine

_FLAGS = (
    "seeds",
    "resume",
    "resume_guided",
    "resume_penalties",
    "resume_repetition",
    "kv_events",
    "logprobs",
    "prompt_logprobs",
    "prompt_embeds",
    "cache_salt",
    "priority",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSupport:
    """The abilities of an engine over all of its configurations, as words (`words`)."""

    name: str  # as in `--engine`
    title: str  # with the version that the adapter is written for
    words: frozenset[str]
    conditions: Mapping[str, str] = field(default_factory=dict)  # word → the settings that it takes
    untried: Mapping[str, str] = field(default_factory=dict)  # word → why no contract test drives it

    def __post_init__(self) -> None:
        for given in (self.conditions, self.untried):
            if unknown := given.keys() - self.words:
                raise ValueError(f"engine {self.name!r}: {sorted(unknown)} are not among its words")


def words(capabilities: Capabilities, kinds: Iterable[str] = ()) -> frozenset[str]:
    """Return a word per ability: "logprobs", "guided json", "role prefill", "handover params", "kind embedding" …"""
    found = {name for name in _FLAGS if getattr(capabilities, name)}
    found |= {f"guided {kind}" for kind in capabilities.guided}
    found |= {f"media {kind}" for kind in capabilities.media}
    found |= {f"role {role.value}" for role in capabilities.roles}
    found |= {f"operation {name}" for name in capabilities.operations}
    found |= {f"sleep level {level}" for level in capabilities.sleep_levels}
    found |= {f"kind {kind}" for kind in kinds}
    if capabilities.disagg is not DisaggStyle.NONE:
        found.add(f"handover {capabilities.disagg.value}")
    if capabilities.lora != "none":
        found.add(f"lora {capabilities.lora}")
    return frozenset(found)


_GUIDED_OPTIONS = frozenset({"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"})


def refuse_undeclared(capabilities: Capabilities, sequence: Sequence) -> None:
    """Raise UnsupportedByEngine naming the first ability that the sequence needs and the engine does not declare.

    A priority is never refused: an engine without priorities serves in the order of arrival.
    """
    kinds = [name for name in sequence.guided or () if name not in _GUIDED_OPTIONS]
    media = [str(item.get("kind")) for item in sequence.media]
    sampling = sequence.sampling
    needs: tuple[tuple[str, bool], ...] = (
        ("seed", sampling.seed is None or not sampling.temperature or capabilities.seeds),
        ("logprobs", sequence.logprobs is None or capabilities.logprobs),
        ("prompt_logprobs", sequence.prompt_logprobs is None or capabilities.prompt_logprobs),
        ("prompt_embeds", sequence.prompt_embeds is None or capabilities.prompt_embeds),
        ("cache_salt", sequence.cache_salt is None or capabilities.cache_salt),
        ("adapter", sequence.adapter is None or capabilities.lora != "none"),
        *((kind, kind in capabilities.guided) for kind in kinds),
        *((kind, kind in capabilities.media) for kind in media),
    )
    for name, able in needs:
        if not able:
            raise UnsupportedByEngine(f"this worker's engine does not support {name!r}", param=name)
    if sequence.handover is not None and capabilities.disagg.value == "none":
        raise UnsupportedByEngine(f"this worker's engine hands nothing over: it cannot be the {sequence.handover.kind} side")


# Reads the LoRA adapters that an engine's settings name (`adapters={"name": "folder", …}`), in the format of PEFT.

ADAPTERS_ARG = "adapters"
ADAPTER_OPERATIONS = frozenset({"load_adapter", "unload_adapter"})
CONFIG = "adapter_config.json"

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The part of an adapter's configuration that decides what room an engine needs for it."""

    rank: int
    modules: tuple[str, ...]


def adapters_of(config: EngineConfig, read: Callable[[str, str, int], A]) -> dict[str, A]:
    """Read the adapters of the engine's settings. Raises EngineStartFailed with the reason.

    `read` makes an engine's own record of an adapter, from its name, its folder and its number, from 1.
    """
    given = config.args.get(ADAPTERS_ARG) or {}
    if not isinstance(given, Mapping):
        raise EngineStartFailed(
            f'{ADAPTERS_ARG} must be a map of names to folders, such as {{"fr": "/models/fr"}}, got {given!r}'
        )
    found = {}
    for number, (name, folder) in enumerate(given.items(), 1):
        if not name or not isinstance(folder, str):
            raise EngineStartFailed(f"{ADAPTERS_ARG}: {name!r} must name a folder, got {folder!r}")
        if name == config.served_name:
            raise EngineStartFailed(f"{ADAPTERS_ARG}: {name!r} is the name of the model itself")
        try:
            found[name] = read(name, folder, number)
        except EngineError as error:
            raise EngineStartFailed(f"{ADAPTERS_ARG}: {error}") from None
    return found


def read_config(name: str, folder: str, *, most_rank: int | None = None) -> LoraConfig:
    """Read an adapter's configuration. Raises EngineError if the folder has no adapter, or one of an impossible rank."""
    path = Path(folder) / CONFIG
    try:
        about = json.loads(path.read_bytes())
        rank, modules = about["r"], about.get("target_modules") or ()
    except OSError as error:
        raise EngineError(f"{name!r} is no adapter: cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"{path} is no adapter's configuration: {error!r}") from None
    if not isinstance(rank, int) or rank < 1 or (most_rank is not None and rank > most_rank):
        possible = "it must be 1 or more" if most_rank is None else f"1 to {most_rank} are possible"
        raise EngineError(f"{name!r} has rank {rank!r}; {possible}")
    return LoraConfig(rank, (modules,) if isinstance(modules, str) else tuple(modules))


def unknown_adapter(name: str, served: Iterable[str]) -> RequestInvalid:
    return RequestInvalid(f"this worker has no adapter {name!r}; it has: {', '.join(served) or 'none'}", param="model")


# Reads a source file of an installed engine without importing it: that would take seconds, and for some a GPU.


def parsed_source(name: str, file: Path, folder: Path | None = None) -> ast.Module | None:
    """Parse `file` of the package in `folder`, by default of the installed package `name`.

    Return None where there is no such package or file, or it is not Python.
    """
    if folder is None:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            return None
        folder = Path(spec.origin).parent
    try:
        return ast.parse((folder / file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


_PLAIN = {"int": "a whole number", "float": "a number", "bool": "true or false"}
_OPTIONAL = re.compile(r"Optional\[(\w+)\]\Z")


def check_plain_types(engine: str, args: Mapping[str, Any], annotations: Mapping[str, str]) -> None:
    """Raise EngineStartFailed for the first value that is not of the plain type that its setting has.

    `engine` is the name in the error. Settings of other types, and without an annotation, pass.
    """
    for name, value in args.items():
        annotation = _OPTIONAL.sub(r"\1 | None", annotations.get(name, ""))
        kinds = {kind.strip() for kind in annotation.split("|")} - {"None"}
        if kinds and kinds <= _PLAIN.keys() and not _fits(value, kinds):
            wanted = " or ".join(text for kind, text in _PLAIN.items() if kind in kinds)
            raise EngineStartFailed(f"{engine} takes {wanted} as {name}, not {value!r}")


def json_as_text(args: Mapping[str, Any], annotations: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings with objects and lists written as JSON where the engine takes text and nothing else.

    An engine reads such a setting from its command line, as text; the value of `--engine-arg` was read as JSON before.
    """
    return {
        name: json.dumps(value) if isinstance(value, dict | list) and _is_text(annotations.get(name, "")) else value
        for name, value in args.items()
    }


def _is_text(annotation: str) -> bool:
    return {kind.strip() for kind in _OPTIONAL.sub(r"\1", annotation).split("|")} - {"None"} == {"str"}


def _fits(value: Any, kinds: set[str]) -> bool:
    if value is None:
        return True
    if isinstance(value, bool):
        return "bool" in kinds
    if isinstance(value, int):
        return value in (0, 1) or bool(kinds & {"int", "float"})
    return isinstance(value, float) and ("float" in kinds or value.is_integer())


# Reserves a TCP port for a server that an engine starts later: a bound socket keeps it from other processes until then.


def reserve_port(stack: ExitStack, host: str, port: int) -> int:
    """Bind a port until `stack` is closed, 0 = any free one, and return it. Raises OSError, OverflowError.

    A process that allows the reuse of addresses can listen on it all the same: this socket does so, too, and never listens.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    held = stack.enter_context(socket.socket(family, kind))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(address)
    return int(held.getsockname()[1])


# Makes NIXL's progress thread pause between two polls.
#
# NIXL's Python class starts a thread that looks for transfers without ever pausing: a whole core per engine, also while
# nothing is transferred. Beside a GPU that core is not missed. Where the engines themselves compute on the cores it is not:
# one prefill and one decode engine would leave each other nothing. The bindings have a setting for it (`pthrDelay`), which
# the class overwrites with 0; so the class is given a config object that does not take that.
#
# Imported in the processes of vLLM's workers and SGLang's schedulers, before they make their agent.

PAUSE_US = 200
"""Microseconds that the thread sleeps between two polls, by which transfers are seen later; they take milliseconds anyway."""


def pace_nixl() -> bool:
    """Have every agent that this process creates from now on pause its progress thread. Returns False without such a NIXL."""
    try:
        from nixl import _api
    except ImportError:
        return False
    bindings: Any = getattr(_api, "nixlBind", None)
    config: Any = getattr(bindings, "nixlAgentConfig", None)
    delay: Any = getattr(config, "pthrDelay", None)
    if config is None or not hasattr(delay, "__set__"):
        return False

    class Paced(config):  # type: ignore[misc]  # known at run time only
        def __init__(self) -> None:
            super().__init__()
            delay.__set__(self, PAUSE_US)

        @property
        def pthrDelay(self) -> object:  # noqa: N802 - NIXL's name
            return delay.__get__(self)

        @pthrDelay.setter
        def pthrDelay(self, value: object) -> None:  # noqa: N802
            """Ignore the value."""

    class PacedBindings:
        nixlAgentConfig = Paced  # noqa: N815 - NIXL's name

        def __getattr__(self, name: str) -> object:
            return getattr(bindings, name)

    _api.nixlBind = PacedBindings()
    return True
