"""Describes a hook for SGLang's `HookRegistry`, so that the modules of this folder import nothing of SGLang."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Literal

from headrace.workers.kit import pace_nixl


@dataclass(frozen=True, slots=True)
class Hook:
    """A function to put in front of, around or in place of `target`, a dotted path."""

    target: str
    function: Callable[..., Any]
    kind: Literal["before", "after", "around", "replace"]


# Lets SGLang's hierarchical cache (HiCache) copy pages between two tensors of the machine's memory.
#
# HiCache registers its host pool with CUDA, copies with CUDA kernels and orders the copies on CUDA streams. On a CPU a copy
# is done when its call returns, so that registering and ordering have nothing to do. Only `hicache_io_backend=direct` with
# `hicache_mem_layout=layer_first` copies with the one function that has a stand-in here.


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing."""


def copy_pages(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """Copy tokens between two pools, layer by layer. The indices are of tokens, whatever the size of a page."""
    del page_size
    source, target = src_indices.long(), dst_indices.long()
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[target] = src[source]


def prepare(*_args: Any, **_kwargs: Any) -> None:
    """Give HiCache the copy that SGLang defines with CUDA only, and PyTorch's streams of a CPU the methods that they lack.

    Called before HiCache makes its streams.
    """
    import torch
    from sglang.srt.mem_cache.pool_host import mha

    mha.transfer_kv_direct = copy_pages
    stream: Any = torch.cpu.Stream
    for name in ("synchronize", "wait_stream", "wait_event", "record_event"):
        if not hasattr(stream, name):
            setattr(stream, name, nothing)
    if not hasattr(stream, "query"):
        stream.query = lambda _self: True  # All work is done.


HOST_CACHE_HOOKS: tuple[Hook, ...] = (
    Hook("sglang.srt.mem_cache.l2_transfer.L2TransferEngine.__init__", prepare, "before"),
    Hook("sglang.srt.mem_cache.pool_host.common._cuda_host_register", nothing, "replace"),
)


# Stands in for GPU packages that SGLang imports and that a machine without a GPU cannot have or does not need.
#
# A stand-in can be imported, subclassed and used as a decorator. Calling anything of it raises, naming it: what SGLang does
# here must not depend on it. `sgl_kernel.scalar_type` is the exception, as SGLang builds tables of number types from it at
# import.

PACKAGES = ("IPython", "sgl_kernel", "torchvision")
_CALLABLE = ("sgl_kernel.scalar_type",)


class NotInstalled(RuntimeError):
    """SGLang called something of a package that is not installed on this machine without a GPU."""


class _Absent(type):
    """The type of absent names: every attribute of an absent name is absent, too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{cls.__name__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:  # a decorator
            return args[0]
        if cls.__name__.startswith(_CALLABLE):
            return cls
        if cls.__module__ != __name__:  # a class of SGLang's that derives from an absent one
            return super().__call__(*args, **kwargs)
        raise NotInstalled(f"{cls.__name__} is not installed here, and SGLang called it")

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def _absent(name: str) -> Any:
    return _Absent(name, (), {"__module__": __name__})


class _AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _AbsentModule(spec.name)
        module.__version__ = "0.0"  # type: ignore[attr-defined]  # SGLang compares it
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


def stand_in(packages: Sequence[str] = PACKAGES) -> tuple[str, ...]:
    """Stand in for those of the packages that are not installed, and return their names. Call it before `import sglang`."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return ()
    missing = tuple(name for name in packages if importlib.util.find_spec(name) is None)
    if missing:
        sys.meta_path.append(_Finder(frozenset(missing)))
    return missing


# Tells NIXL that SGLang's KV cache is in the machine's memory, and makes NIXL's progress thread leave cores to the engines.
#
# SGLang names its memory a GPU's, which NIXL refuses without one.

_HOST = "DRAM"


def in_host_memory(original: Callable[..., list[str]], *args: Any, **kwargs: Any) -> list[str]:
    """Name the memory of every layer the machine's own."""
    return [_HOST for _ in original(*args, **kwargs)]


def pace(*_args: Any, **_kwargs: Any) -> None:
    """Pace the agent that is about to be made."""
    pace_nixl()


_NIXL = "sglang.srt.disaggregation.nixl.conn"
NIXL_MEMORY_HOOKS = (
    Hook(f"{_NIXL}._normalize_kv_mem_kinds", in_host_memory, "around"),
    Hook(f"{_NIXL}.NixlKVManager.__init__", pace, "before"),
)


# Drops requests for pinned memory, which PyTorch can only serve with a GPU. SGLang's LoRA and its host cache ask for it.

_MAKERS = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")


def unpinned(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("pin_memory", None)
    return original(*args, **kwargs)


def stay(tensor: Any, *_args: Any, **_kwargs: Any) -> Any:
    return tensor


PINNED_MEMORY_HOOKS = (
    *(Hook(f"torch.{name}", unpinned, "around") for name in _MAKERS),
    Hook("torch.Tensor.pin_memory", stay, "replace"),
)


# Pauses a scheduler that only waits, for pages of another engine or for the end of a pause, so that others have the cores.
#
# SGLang asks again at once, with a core of its own, whether there is something to do: on a GPU nothing else wants that core.

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
SCHEDULER_PAUSE_HOOKS = (
    Hook(f"{_SCHEDULER}.on_idle", pause, "around"),
    Hook(f"{_SCHEDULER}._record_scheduler_state_for_paused_engine", rest, "around"),
)
