"""Pauses a scheduler that only waits, for pages of another engine or for the end of a pause, so that others have the cores.

SGLang asks again at once, with a core of its own, whether there is something to do: on a GPU nothing else wants that core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from headrace.workers.sglang.cpu_plugin.hook import Hook

PAUSE_S = 0.001


def pause(original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Let a moment pass after a turn without a batch, if requests are inside. Without any SGLang sleeps by itself."""
    original(scheduler, *args, **kwargs)
    if not scheduler.is_fully_idle():
        time.sleep(PAUSE_S)


def rest(original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Let a moment pass in a turn of an engine that an operator has paused."""
    original(scheduler, *args, **kwargs)
    time.sleep(PAUSE_S)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (
    Hook(f"{_SCHEDULER}.on_idle", pause, "around"),
    Hook(f"{_SCHEDULER}._record_scheduler_state_for_paused_engine", rest, "around"),
)
