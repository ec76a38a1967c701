"""Registers the hooks that SGLang needs on a machine without a GPU. SGLang calls `install` in each of its processes."""

from __future__ import annotations

import os

from headrace.workers.sglang.cpu_plugin import pinned_memory
from headrace.workers.sglang.cpu_plugin.hook import Hook

HOOKS: tuple[Hook, ...] = (*pinned_memory.HOOKS,)


def install() -> None:
    """Register all hooks, if this SGLang computes on the CPU. The entry point of the group `sglang.srt.plugins`."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))
