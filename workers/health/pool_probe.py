"""Builds the small inputs with which a worker tries an engine that pools, or makes pictures or videos."""

from __future__ import annotations

from headrace.broker.messages import Picture, PoolingTask
from headrace.workers.engine import EngineInfo, PoolItem

_PICTURE = Picture(prompt="a test", width=64, height=64, steps=1)
_VIDEO = Picture(prompt="a test", width=64, height=64, steps=1, seconds=1)
_MADE: dict[PoolingTask, Picture] = {"image": _PICTURE, "video": _VIDEO}


def pool_probe(info: EngineInfo, name: str, token_ids: list[int]) -> PoolItem:
    """Return an input of a task that the engine serves. A pair needs two tokens or more."""
    kinds = info.kinds
    made: PoolingTask | None = next((task for task in _MADE if task in kinds), None)
    task: PoolingTask = made or ("embed" if "embedding" in kinds else "classify")
    return PoolItem(
        id=name,
        task=task,
        token_ids=token_ids,
        second=(len(token_ids) // 2 or None) if "score" in kinds else None,
        picture=_MADE.get(task),
    )
