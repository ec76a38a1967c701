"""Lets SGLang's hierarchical cache (HiCache) copy pages between two tensors of the machine's memory.

HiCache registers its host pool with CUDA, copies with CUDA kernels and orders the copies on CUDA streams. On a CPU a copy is
done when its call returns, so that registering and ordering have nothing to do. Only `hicache_io_backend=direct` with
`hicache_mem_layout=layer_first` copies with the one function that has a stand-in here.
"""

from __future__ import annotations

from typing import Any

from headrace.workers.sglang.cpu_plugin.hook import Hook


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


HOOKS: tuple[Hook, ...] = (
    Hook("sglang.srt.mem_cache.l2_transfer.L2TransferEngine.__init__", prepare, "before"),
    Hook("sglang.srt.mem_cache.pool_host.common._cuda_host_register", nothing, "replace"),
)
