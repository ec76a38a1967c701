"""Registers the hooks that SGLang needs. SGLang calls `install` in each of its processes.

Those of `cpu_plugin` are for machines without a GPU, those of `local_prefill` and `resumed_penalties` for all.
"""

from __future__ import annotations

import os

from headrace.workers.sglang import convert, cpu_plugin, disagg_rendezvous
from headrace.workers.sglang.cpu_plugin import Hook

EVERYWHERE: tuple[Hook, ...] = (*disagg_rendezvous.HOOKS, *convert.HOOKS)
HOOKS: tuple[Hook, ...] = (
    *cpu_plugin.PINNED_MEMORY_HOOKS,
    *cpu_plugin.NIXL_MEMORY_HOOKS,
    *cpu_plugin.HOST_CACHE_HOOKS,
    *cpu_plugin.SCHEDULER_PAUSE_HOOKS,
)


def install() -> None:
    """Register the hooks for where this SGLang computes. The entry point of the group `sglang.srt.plugins`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    on_cpu = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
    for hook in (*EVERYWHERE, *(HOOKS if on_cpu else ())):
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))
