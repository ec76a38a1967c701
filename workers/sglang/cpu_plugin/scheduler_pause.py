"""Pauses a scheduler that only waits for pages of another engine, so that the one that computes them has the cores.

SGLang asks again at once, with a core of its own, whether a hand-over has come further: on a GPU nothing else wants that core.
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


HOOKS = (Hook("sglang.srt.managers.scheduler.Scheduler.on_idle", pause, "around"),)
