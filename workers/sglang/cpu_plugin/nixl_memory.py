"""Tells NIXL that SGLang's KV cache is in the machine's memory. SGLang names it a GPU's, which NIXL refuses without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.workers.sglang.cpu_plugin.hook import Hook

_HOST = "DRAM"


def in_host_memory(original: Callable[..., list[str]], *args: Any, **kwargs: Any) -> list[str]:
    """Name the memory of every layer the machine's own."""
    return [_HOST for _ in original(*args, **kwargs)]


HOOKS = (Hook("sglang.srt.disaggregation.nixl.conn._normalize_kv_mem_kinds", in_host_memory, "around"),)
