"""Polls what TensorRT-LLM reports only when it is asked: KV events and statistics of its iterations.

Its iterators end when nothing came for `timeout` seconds, and in 1.2 one that has ended stays so until the next request is
submitted, or until `mark_undone` is called. Before the first request there is nothing to poll at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import structlog

_log = structlog.get_logger()

WAIT_S = 0.005  # how long an iterator waits for the next item
BUSY_S = 0.01  # between two polls while they bring something, or while requests run
IDLE_S = 0.1  # between two polls of an engine without requests
MOST_AT_ONCE = 4096
_EMPTY = (asyncio.QueueEmpty, IndexError, TimeoutError)  # what versions raise in place of ending the iteration


async def poll_once(ask: Callable[..., Any], *, wait_s: float = WAIT_S) -> list[Mapping[str, Any]]:
    """Return the items that are there now. `ask` is a method of the engine that returns an async iterator."""
    found: list[Mapping[str, Any]] = []
    try:
        results = ask(timeout=wait_s)
    except AssertionError:  # nothing was submitted yet
        return found
    if (undone := getattr(results, "mark_undone", None)) is not None:
        undone()
    try:
        async for item in results:
            found += item if isinstance(item, list) else [item]
            if len(found) >= MOST_AT_ONCE:
                break
    except _EMPTY:
        return found
    return found


async def keep_polling(
    ask: Callable[..., Any], use: Callable[[list[Mapping[str, Any]]], None], busy: Callable[[], bool], *, what: str
) -> None:
    """Poll until cancelled and hand over what comes. A poll that fails is logged, and tried again later."""
    failures = 0
    while True:
        try:
            found = await poll_once(ask)
            failures = 0
        except Exception as error:  # the engine is dying, or its own queue is broken
            failures += 1
            if failures == 1:
                _log.warning("engine.poll_failed", engine="trtllm", what=what, error=repr(error))
            found = []
        if found:
            use([item for item in found if item])
        await asyncio.sleep(IDLE_S if failures or not (found or busy()) else BUSY_S)
