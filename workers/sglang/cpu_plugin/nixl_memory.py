"""Tells NIXL that SGLang's KV cache is in the machine's memory, and makes NIXL's progress thread leave cores to the engines.

SGLang names its memory a GPU's, which NIXL refuses without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.workers.nixl_pacing import pace_nixl
from headrace.workers.sglang.cpu_plugin.hook import Hook

_HOST = "DRAM"


def in_host_memory(original: Callable[..., list[str]], *args: Any, **kwargs: Any) -> list[str]:
    """Name the memory of every layer the machine's own."""
    return [_HOST for _ in original(*args, **kwargs)]


def pace(*_args: Any, **_kwargs: Any) -> None:
    """Pace the agent that is about to be made."""
    pace_nixl()


_NIXL = "sglang.srt.disaggregation.nixl.conn"
HOOKS = (
    Hook(f"{_NIXL}._normalize_kv_mem_kinds", in_host_memory, "around"),
    Hook(f"{_NIXL}.NixlKVManager.__init__", pace, "before"),
)
