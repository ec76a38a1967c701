"""The engines by name, imported only when asked for: an ordinary worker must not pay for another engine's imports."""

from __future__ import annotations

from workers.engine import Engine
from workers.errors import EngineStartFailed
from workers.parsing.choosing import Brand

NAMES = ("sim", "vllm")


def create(name: str) -> Engine:
    """A new, not yet started engine. Raises EngineStartFailed for an unknown name or an engine that is not installed."""
    try:
        if name == "sim":
            from workers.sim.engine import SimEngine

            return SimEngine()
        if name == "vllm":
            from workers.vllm.engine import VllmEngine

            return VllmEngine()
    except ModuleNotFoundError as error:
        raise EngineStartFailed(f"engine {name!r} is not installed here: {error}") from error
    raise EngineStartFailed(f"engine {name!r} is unknown; there are {', '.join(NAMES)}")


def parser_brand(name: str) -> Brand:
    """The parsers for tool calls and reasoning that come with this engine."""
    if name == "vllm":
        from workers.vllm.parsing import VllmBrand

        return VllmBrand()
    from workers.parsing.builtin import BuiltinBrand

    return BuiltinBrand()
