"""vLLM's offloading for engines that compute without a GPU; loaded by vLLM by this module's path.

vLLM's own spec refuses to start there, because its worker copies on CUDA streams. What is on "the device" is memory then, and a
copy of memory to memory needs none of that; everything else (which blocks are kept, which go, the events) is vLLM's.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemoryCopies(OffloadingWorker):  # type: ignore[misc]  # vLLM is untyped to us
    """Copies blocks between the engine's memory and the host tier, each at once and in the thread that asks.

    A chunk of the host tier has the same blocks of all of vLLM's tensors: a block's bytes per tensor, or those of several
    blocks in a row (`blocks_per_chunk`).
    """

    def __init__(
        self, device: list[torch.Tensor], host: list[torch.Tensor], *, blocks_per_chunk: int, region: Any = None
    ) -> None:
        """`device` and `host`: per tensor of the cache the bytes of block n, or of chunk n, in row n.

        `region`: the memory of `host`, to be let go at the end.
        """
        self._pairs = [
            (blocks, chunks.view(len(chunks), blocks_per_chunk, -1)) for blocks, chunks in zip(device, host, strict=True)
        ]
        self._per_chunk = blocks_per_chunk
        self._region = region
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        rows, chunks, places = self._positions(src_spec, dst_spec)
        start = time.perf_counter()
        for blocks, host in self._pairs:
            host[chunks, places] = blocks[rows]
        return self._finished(job_id, len(rows), start)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        rows, chunks, places = self._positions(dst_spec, src_spec)
        start = time.perf_counter()
        for blocks, host in self._pairs:
            blocks[rows] = host[chunks, places]
        return self._finished(job_id, len(rows), start)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: a copy is finished when it is submitted."""

    def shutdown(self) -> None:
        self._pairs = []
        if self._region is not None:
            self._region.cleanup()

    def _positions(self, blocks: GPULoadStoreSpec, chunks: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return for each block its row, its chunk and its place in that chunk.

        The blocks of a group are in a row, and the first need not be the first of its chunk.
        """
        chunk_of: list[int] = []
        place_of: list[int] = []
        taken = 0
        for size, first in zip(blocks.group_sizes, blocks.block_indices, strict=True):
            if not size:
                continue
            skipped = first % self._per_chunk
            for number in range(skipped, skipped + size):
                chunk_of.append(int(chunks.block_ids[taken + number // self._per_chunk]))
                place_of.append(number % self._per_chunk)
            taken += -(-(skipped + size) // self._per_chunk)
        return torch.as_tensor(blocks.block_ids, dtype=torch.long), torch.tensor(chunk_of), torch.tensor(place_of)

    def _finished(self, job_id: int, blocks: int, start: float) -> bool:
        size = blocks * sum(rows.shape[1] for rows, _ in self._pairs)
        took_s = time.perf_counter() - start
        self._done.append(TransferResult(job_id=job_id, success=True, transfer_size=size, transfer_time=took_s))
        return True


def device_rows(kv_caches: Any) -> list[torch.Tensor]:
    """Return per tensor of the cache the bytes of block n in row n."""
    return [cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes) for cache in kv_caches.tensors]


def check_size(spec: Any) -> None:
    """Raise ValueError for a host tier without room for a single block."""
    if not spec.num_chunks:
        raise ValueError(f"kv_offloading_size is too small for a single block of {spec.kv_bytes_per_chunk} bytes")


class CpuHostSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """A host tier in memory of the process that computes."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            check_size(self)
            device = device_rows(kv_caches)
            host = [torch.zeros((self.num_chunks, rows.shape[1] * self.blocks_per_chunk), dtype=torch.int8) for rows in device]
            self._worker = MemoryCopies(device, host, blocks_per_chunk=self.blocks_per_chunk)
        return self._worker


class CpuTieredSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """A host tier in memory that the scheduler sees too, because vLLM's tiers behind it copy from there.

    The memory is a file that both open by its name. The name must stay until then, or each has memory of its own, and blocks
    come back empty. With a single process that computes it is removed as soon as both have it, so that an engine that is
    killed leaves nothing behind.
    """

    _worker: Any

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Return the worker that copies. vLLM asks for it before it asks for the manager."""
        if self._worker is None:
            check_size(self)
            device = device_rows(kv_caches)
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
                barrier=None,
            )
            if self.config.parallel.world_size == 1:
                region._creator = False  # its name goes below  # noqa: SLF001
            host = [region.create_next_worker_view(rows.shape[1] * self.blocks_per_chunk) for rows in device]
            self._worker = MemoryCopies(device, host, blocks_per_chunk=self.blocks_per_chunk, region=region)
        return self._worker

    def get_manager(self) -> Any:
        manager = super().get_manager()
        region = self._scheduler_mmap
        if region is not None and not region._creator and self.config.parallel.world_size == 1:  # noqa: SLF001
            with contextlib.suppress(FileNotFoundError):
                os.unlink(region.mmap_path)
        return manager
