"""Drops requests for pinned memory, which PyTorch can only serve with a GPU. SGLang's LoRA and its host cache ask for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.workers.sglang.cpu_plugin.hook import Hook

_MAKERS = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")


def unpinned(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a tensor in ordinary memory."""
    kwargs.pop("pin_memory", None)
    return original(*args, **kwargs)


def stay(tensor: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Return the tensor where it is."""
    return tensor


HOOKS = (*(Hook(f"torch.{name}", unpinned, "around") for name in _MAKERS), Hook("torch.Tensor.pin_memory", stay, "replace"))
