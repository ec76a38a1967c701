"""The tiers behind the host tier, as vLLM's offloading framework wants them; loaded by vLLM by this module's path.

vLLM calls a tier from its scheduler, so nothing here waits: look-ups go to vLLM's own look-up thread, blocks to `Transfers`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import platform
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from headrace.workers.broker_access import BrokerAccess
from headrace.workers.vllm.tiers.block_store import BlockStore
from headrace.workers.vllm.tiers.folder_store import FolderStore
from headrace.workers.vllm.tiers.identity import model_files, model_identity, namespace
from headrace.workers.vllm.tiers.object_store import ObjectBlockStore
from headrace.workers.vllm.tiers.transfers import Limits, Transfers

TROUBLE = "vllm:kv_offload_tier_trouble"


class _LookUps(AsyncLookupManager):  # type: ignore[misc]  # vLLM is untyped to us
    def __init__(self, tier: StoreTier, tier_type: str) -> None:
        self._tier = tier
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> list[bool]:
        """Look keys up, in vLLM's thread for that."""
        return self._tier.transfers.held([self._tier.name_of(key) for key in keys])


class StoreTier(SecondaryTierManager):  # type: ignore[misc]
    """A tier in a `BlockStore`."""

    medium = Medium.STORAGE
    tells = False  # whether routers are told of its blocks

    def __init__(
        self, *, store: BlockStore, model: str, revision: str | None, settings: str, wait_s: float, **framework: Any
    ) -> None:
        """`model`, `revision`: as the engine was given them. `settings`: the engine's that blocks depend on."""
        super().__init__(**framework)
        spec, tier_type = framework["offloading_spec"], framework["tier_type"]
        identity = model_identity(model_files(model, revision))
        self._namespace = namespace(identity, settings, *_layout(spec, self.block_size_bytes))
        self._bytes: memoryview = framework["primary_kv_view"].cast("B")
        self._loads: dict[int, list[bytes]] = {}
        self._stores: dict[int, concurrent.futures.Future[None]] = {}
        self._told: set[str] = set()
        self._tells = self.tells and spec.kv_events_config.enable_kv_cache_events
        limits = Limits(wait_s=wait_s)
        self.transfers = Transfers(store, size=self.block_size_bytes, limits=limits, name=tier_type, tells=self._tells)
        self._look_ups = _LookUps(self, tier_type)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Describe our counter to vLLM."""
        text = "Blocks or calls that a KV tier failed on, by kind; what they were for was computed, or not stored"
        return {TROUBLE: OffloadingCounterMetadata(documentation=text, labelnames=("tier", "kind"))}

    def name_of(self, key: bytes) -> str:
        """Return the name of a block in the store."""
        return f"{self._namespace}/{get_offload_block_hash(key).hex()}-{get_offload_group_idx(key)}"

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        found = self._look_ups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        names = [self.name_of(key) for key in job_metadata.keys]
        self._stores[job_metadata.job_id] = self.transfers.store(names, self._places(job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        keys = list(job_metadata.keys)
        self._loads[job_metadata.job_id] = keys
        self.transfers.load(job_metadata.job_id, [self.name_of(key) for key in keys], self._places(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        ends = []
        for job, accepted in list(self._stores.items()):
            if accepted.done():
                del self._stores[job]
                ends.append(JobResult(job_id=job, success=accepted.exception() is None))
        while self.transfers.loaded:
            loaded = self.transfers.loaded.popleft()
            keys = self._loads.pop(loaded.job)
            arrived = set(loaded.names)
            there = [key for key in keys if self.name_of(key) in arrived]
            self._look_ups.mark_miss([key for key in keys if self.name_of(key) not in arrived])
            whole = len(there) == len(keys)
            ends.append(
                JobResult(
                    job_id=loaded.job,
                    success=whole,
                    successful_keys=None if whole or not there else there,
                    transfer_time=loaded.took_s,
                    transfer_bytes=len(there) * self.block_size_bytes,
                )
            )
        return ends

    def take_events(self) -> Iterable[OffloadingEvent]:
        changes = self.transfers.changes
        while changes:
            change = changes.popleft()
            # What an earlier engine has left was not told, so its end is not told either.
            names = set(change.names)
            if change.removed:
                names &= self._told
                self._told -= names
            else:
                self._told |= names
            if keys := [key for name in names if (key := self._key_of(name)) is not None]:
                yield OffloadingEvent(keys=keys, medium=self.medium, removed=change.removed, locality=self.locality)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._look_ups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._look_ups.flush()

    def get_stats(self) -> OffloadingConnectorStats | None:
        troubles = self.transfers.troubles()
        if not troubles:
            return None
        stats = OffloadingConnectorStats()
        for kind, count in troubles.items():
            stats.increase_counter(TROUBLE, count, (self.tier_type, kind))
        return stats

    def drain_jobs(self) -> None:
        """Let nothing touch the host tier any more. vLLM asks for this when it empties its cache, and tells that itself."""
        self._told.clear()
        self.transfers.drain()
        concurrent.futures.wait(self._stores.values())

    def shutdown(self) -> None:
        self._look_ups.shutdown()
        self.transfers.close()
        with contextlib.suppress(BufferError):  # a load that was given up may still have its places
            self._bytes.release()

    def _places(self, job: TransferJob) -> list[memoryview]:
        size = self.block_size_bytes
        return [self._bytes[int(chunk) * size : (int(chunk) + 1) * size] for chunk in job.chunk_ids]

    def _key_of(self, name: str) -> bytes | None:
        """Return the key of a block of this engine's namespace."""
        space, _, rest = name.partition("/")
        if space != self._namespace:
            return None
        digest, _, group = rest.partition("-")
        key: bytes = make_offload_key(bytes.fromhex(digest), int(group))
        return key


class FolderTier(StoreTier):
    """A tier in a folder of this machine."""

    tells = True

    def __init__(self, *, folder: str, max_bytes: int, **given: Any) -> None:
        super().__init__(store=FolderStore(Path(folder).expanduser(), max_bytes), **given)
        self.locality = Locality.LOCAL


class ObjectTier(StoreTier):
    """A tier in the broker, for all workers. What is there says nothing for or against one of them, so no router is told."""

    def __init__(self, *, access: str, **given: Any) -> None:
        broker = BrokerAccess.read(Path(access))
        options = replace(broker.options, name=f"{broker.options.name or 'worker'}-kv")
        super().__init__(store=ObjectBlockStore(options, broker.subjects, pool=broker.pool), **given)
        self.locality = Locality.REMOTE


def _layout(spec: Any, block_bytes: int) -> tuple[object, ...]:
    """Return what the bytes of a block depend on in this process: versions, number type, cache groups, hashes, ranks."""
    config = spec.config
    return (
        vllm.__version__,
        platform.python_version_tuple()[:2],  # vLLM's default hash is over pickled values
        current_platform.device_type,
        os.environ.get("PYTHONHASHSEED"),  # vLLM's hashes begin with it
        config.model.dtype,
        config.kv_cache_layout,
        config.cache,
        config.groups,
        config.parallel.world_size,
        config.parallel.tp_size,
        config.parallel.pp_size,
        config.parallel.pcp_size,
        config.parallel.dcp_size,
        config.replicated_layout,
        config.canonical_layout,
        block_bytes,
    )


disk, store = FolderTier, ObjectTier
"""The names by which vLLM finds the tiers, and that its metrics have as label `tier`."""
