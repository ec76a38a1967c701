"""The engines by name, imported only when asked for: an ordinary worker must not pay for another engine's imports."""

from __future__ import annotations

from workers.engine import Engine
from workers.errors import EngineStartFailed

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
