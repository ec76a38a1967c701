"""Creates engines by name and imports only the requested one, because other engines' imports take seconds."""

from __future__ import annotations

import importlib
from types import ModuleType

from headrace.workers.engine import Engine
from headrace.workers.errors import EngineStartFailed
from headrace.workers.kit import EngineSupport
from headrace.workers.parsing.selection import ParserFamily

_HOMES = {
    "sim": "sim.engine:SimEngine",
    "sglang": "sglang.engine:SglangEngine",
    "trtllm": "trtllm.engine:TrtllmEngine",
    "vllm": "vllm.engine:VllmEngine",
    "diffusion": "diffusion:DiffusionEngine",
}
NAMES = tuple(_HOMES)
MEMBERS = tuple(name for name in vars(Engine) if not name.startswith("_"))
"""The members that the engine protocol requires."""


def create(name: str) -> Engine:
    """Return a new engine that is not started yet: one of `NAMES`, or `module:Class` of the user's own.

    Raises EngineStartFailed for an unknown name, or an engine that is not installed or does not implement the protocol.
    """
    if name in _HOMES:
        try:
            module, made = _home(name)
        except ModuleNotFoundError as error:
            raise EngineStartFailed(f"engine {name!r} is not installed here: {error}") from error
        engine: Engine = getattr(module, made)()
        return engine
    if ":" in name:
        return _load(name)
    raise EngineStartFailed(f"engine {name!r} is unknown; there are {', '.join(NAMES)}, or your own as module:Class")


def supports() -> tuple[EngineSupport, ...]:
    """Return what each engine of `NAMES` declares over all of its settings. Needs none of them installed."""
    return tuple(map(support_of, NAMES))


def support_of(name: str) -> EngineSupport:
    support: EngineSupport = _home(name)[0].SUPPORT
    return support


def _home(name: str) -> tuple[ModuleType, str]:
    module, _, made = _HOMES[name].partition(":")
    return importlib.import_module(f"headrace.workers.{module}"), made


def _load(name: str) -> Engine:
    """Import `module:Class` and create an instance. Raises EngineStartFailed for any exception of the operator's code."""
    module_name, _, class_name = name.partition(":")
    try:
        made = getattr(importlib.import_module(module_name), class_name)()
    except AttributeError as error:
        raise EngineStartFailed(f"engine {name!r}: {error}") from error
    except ImportError as error:
        raise EngineStartFailed(f"engine {name!r} cannot be imported: {error}; is its folder on PYTHONPATH?") from error
    except Exception as error:
        raise EngineStartFailed(f"engine {name!r} cannot be made: {type(error).__name__}: {error}") from error
    if missing := [member for member in MEMBERS if not hasattr(made, member)]:
        raise EngineStartFailed(f"engine {name!r} does not implement headrace.workers.engine.Engine: no {', '.join(missing)}")
    engine: Engine = made
    return engine


def parser_family(name: str) -> ParserFamily:
    """Return the parsers for tool calls and reasoning of this engine: the built-in ones but for vLLM and SGLang."""
    if name == "vllm":
        from headrace.workers.vllm.parsing import VllmParserFamily

        return VllmParserFamily()
    if name == "sglang":
        from headrace.workers.sglang.parsing import SglangParserFamily

        return SglangParserFamily()
    from headrace.workers.parsing.builtin import BuiltinParserFamily

    return BuiltinParserFamily()
