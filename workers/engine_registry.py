"""The engines by name, imported only when asked for: an ordinary worker must not pay for another engine's imports."""

from __future__ import annotations

from headrace.workers.engine import Engine
from headrace.workers.errors import EngineStartFailed
from headrace.workers.parsing.selection import ParserFamily

NAMES = ("sim", "vllm")


def create(name: str) -> Engine:
    """A new, not yet started engine. Raises EngineStartFailed for an unknown name or an engine that is not installed."""
    try:
        if name == "sim":
            from headrace.workers.sim.engine import SimEngine

            return SimEngine()
        if name == "vllm":
            from headrace.workers.vllm.engine import VllmEngine

            return VllmEngine()
    except ModuleNotFoundError as error:
        raise EngineStartFailed(f"engine {name!r} is not installed here: {error}") from error
    raise EngineStartFailed(f"engine {name!r} is unknown; there are {', '.join(NAMES)}")


def parser_brand(name: str) -> ParserFamily:
    """The parsers for tool calls and reasoning that come with this engine."""
    if name == "vllm":
        from headrace.workers.vllm.parsing import VllmParserFamily

        return VllmParserFamily()
    from headrace.workers.parsing.builtin import BuiltinBrand

    return BuiltinBrand()
