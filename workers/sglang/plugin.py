"""Registers the hooks that SGLang needs. SGLang calls `install` in each of its processes.

Those of `cpu_plugin` are for machines without a GPU, those of `local_prefill` and `resumed_penalties` for all.
"""

from __future__ import annotations

import os

from headrace.workers.sglang import local_prefill, resumed_penalties
from headrace.workers.sglang.cpu_plugin import host_cache, nixl_memory, pinned_memory, scheduler_pause
from headrace.workers.sglang.cpu_plugin.hook import Hook

EVERYWHERE: tuple[Hook, ...] = (*local_prefill.HOOKS, *resumed_penalties.HOOKS)
HOOKS: tuple[Hook, ...] = (*pinned_memory.HOOKS, *nixl_memory.HOOKS, *host_cache.HOOKS, *scheduler_pause.HOOKS)


def install() -> None:
    """Register the hooks for where this SGLang computes. The entry point of the group `sglang.srt.plugins`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    on_cpu = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
    for hook in (*EVERYWHERE, *(HOOKS if on_cpu else ())):
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))
