"""Creates engines by name and imports only the requested one, because other engines' imports take seconds."""

from __future__ import annotations

import importlib

from headrace.workers.engine import Engine
from headrace.workers.errors import EngineStartFailed
from headrace.workers.kit import EngineSupport
from headrace.workers.parsing.selection import ParserFamily

NAMES = ("sim", "sglang", "trtllm", "vllm", "diffusion")
MEMBERS = tuple(name for name in vars(Engine) if not name.startswith("_"))
"""The members that the engine protocol requires."""


def create(name: str) -> Engine:
    """Return a new engine that is not started yet: one of `NAMES`, or `module:Class` of the user's own.

    Raises EngineStartFailed for an unknown name, or an engine that is not installed or does not implement the protocol.
    """
    try:
        if name == "sim":
            from headrace.workers.sim.engine import SimEngine

            return SimEngine()
        if name == "diffusion":
            from headrace.workers.diffusion import DiffusionEngine

            return DiffusionEngine()
        if name == "trtllm":
            from headrace.workers.trtllm.engine import TrtllmEngine

            return TrtllmEngine()
        if name == "vllm":
            from headrace.workers.vllm.engine import VllmEngine

            return VllmEngine()
        if name == "sglang":
            from headrace.workers.sglang.engine import SglangEngine

            return SglangEngine()
    except ModuleNotFoundError as error:
        raise EngineStartFailed(f"engine {name!r} is not installed here: {error}") from error
    if ":" in name:
        return _load(name)
    raise EngineStartFailed(f"engine {name!r} is unknown; there are {', '.join(NAMES)}, or your own as module:Class")


def supports() -> tuple[EngineSupport, ...]:
    """Return what each engine of `NAMES` declares over all of its settings. Needs none of them installed."""
    homes = [f"{name}.support" for name in NAMES if name != "diffusion"] + ["diffusion"]  # one module, which imports no package
    return tuple(importlib.import_module(f"headrace.workers.{home}").SUPPORT for home in homes)


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
