"""Implements the engine protocol with SGLang in a child process. Ids go in, ids come out.

SGLang ends its whole process tree when one of its processes fails. The tree's root is the child; the worker sees its end,
`died` returns, and the worker hands its work over and ends.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from headrace.workers.engine import (
    POOLING_KINDS,
    Capabilities,
    DisaggStyle,
    EngineConfig,
    EngineInfo,
    KvEvent,
    Load,
    Output,
    Pooled,
    PoolItem,
    Role,
    Sequence,
    Sink,
    Tier,
)
from headrace.workers.errors import EngineDead, RequestInvalid, UnsupportedByEngine
from headrace.workers.kit import ADAPTER_OPERATIONS, GUIDED, EngineSupport, ProcessEngine, refuse_undeclared, words
from headrace.workers.kv.feed import BatchReader, tier_of
from headrace.workers.kv.zmq_listener import AllBlocksCleared, KvPayload, RankListeners
from headrace.workers.sglang.describe import OPERATIONS, PAUSE_OPERATIONS
from headrace.workers.sglang.messages import Abort, ChildProcess, Control, PoolInput, Start, Submit
from headrace.workers.sglang.settings import kv_events_wanted, ranks

# Shows SGLang's Prometheus metrics on the worker's `/metrics`. Its processes write them into a folder that it is told.

FOLDER = "PROMETHEUS_MULTIPROC_DIR"


class EngineMetrics:
    """The metrics of one SGLang. Implements the `Collector` of prometheus_client."""

    def __init__(self, folder: Path, registry: CollectorRegistry = REGISTRY) -> None:
        """`folder` must exist; SGLang makes one of its own in it."""
        self._registry = registry
        self._folder = folder
        self._registered = False

    def environment(self) -> dict[str, str]:
        """Return the variable that names the folder to SGLang."""
        return {FOLDER: str(self._folder)}

    def register(self) -> None:
        self._registry.register(self)
        self._registered = True

    def unregister(self) -> None:
        if self._registered:
            self._registered = False
            self._registry.unregister(self)

    def describe(self) -> Iterable[Metric]:
        """Tell nothing ahead of time: which metrics there are depends on what SGLang does."""
        return ()

    def collect(self) -> Iterable[Metric]:
        for place in (self._folder, *(path for path in self._folder.iterdir() if path.is_dir())):
            files: Any = MultiProcessCollector  # untyped
            yield from files(CollectorRegistry(), path=str(place)).collect()


# Translates SGLang's KV events from its wire format.
#
# SGLang publishes one batch per scheduler step over ZeroMQ, framed as vLLM does it; the payload is msgpack `[time, [event,
# …], rank]`, an event being a map with its class name under `type`. Hashes are signed. Only in the format "dynamo" do they
# differ between salts and adapters with the same tokens, and only then does an event name its adapter; that format is the one
# that `kv_listener` asks for. Unknown fields are ignored.

TIER_OF: dict[str, Tier] = {"GPU": "device", "CPU_PINNED": "host", "DISK": "disk", "EXTERNAL": "disk"}
"""SGLang's mediums: "GPU" is also a CPU engine's own memory, and a pool outside of the machine counts as the slowest tier."""

_U64 = (1 << 64) - 1


class BlockStored(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored"):
    """Consecutive pages were stored in the cache."""

    block_hashes: list[int]
    parent_block_hash: int | None = None
    token_ids: list[int | tuple[int, int]] = []  # pairs with a draft model that reads the next token, too
    block_size: int = 0
    medium: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved"):
    """Pages were removed from the cache."""

    block_hashes: list[int]
    medium: str | None = None


Event = BlockStored | BlockRemoved | AllBlocksCleared


def _event(event: Event) -> KvEvent:
    if isinstance(event, AllBlocksCleared):
        return KvEvent(kind="cleared")
    tier = tier_of(event.medium, TIER_OF)
    hashes = [hash_ & _U64 for hash_ in event.block_hashes]
    if isinstance(event, BlockRemoved):
        return KvEvent(kind="removed", tier=tier, hashes=hashes)
    return KvEvent(
        kind="stored",
        tier=tier,
        hashes=hashes,
        parent=None if event.parent_block_hash is None else event.parent_block_hash & _U64,
        token_ids=[token if isinstance(token, int) else token[0] for token in event.token_ids],
        adapter=event.lora_name,
        salt=event.cache_salt,
        block_size=event.block_size or None,
    )


read_batch = BatchReader("sglang", msgspec.msgpack.Decoder(KvPayload[Event]), _event).read


class KvListener(RankListeners):
    """Listens to SGLang's KV events. Create it before SGLang starts, with `config()`."""

    def __init__(self, folder: Path, *, ranks: int = 1) -> None:
        super().__init__(folder, engine="SGLang", read_batch=read_batch, ranks=ranks)

    def config(self) -> dict[str, Any]:
        # The worker binds; hashes of this format differ between salts and adapters, and its events name adapters.
        return {**super().config(), "bind": False, "format": "dynamo"}


_MOST = Capabilities(
    roles=frozenset({Role.AGGREGATED, Role.PREFILL, Role.DECODE}),
    disagg=DisaggStyle.RENDEZVOUS,
    kv_events=True,
    logprobs=True,
    prompt_logprobs=True,
    guided=GUIDED,
    lora="dynamic",
    resume_penalties=True,
    resume_repetition=True,
    cache_salt=True,
    priority=True,
    operations=OPERATIONS | PAUSE_OPERATIONS | ADAPTER_OPERATIONS,
)

_ADAPTERS = "`adapters` or `enable_lora=true`"
_NO_OVERLAP = "`disable_overlap_schedule=true`, as without a GPU"
_APART = "prefill and decode apart have tests of their own"
_WORDS = words(_MOST, ("chat", "completion", "embedding"))

SUPPORT = EngineSupport(
    name="sglang",
    title="SGLang 0.5.23",
    words=_WORDS,
    conditions={
        "resume_penalties": _NO_OVERLAP,
        "resume_repetition": _NO_OVERLAP,
        "role prefill": "role `prefill`",
        "role decode": "role `decode`",
        "handover rendezvous": "role `prefill` or `decode`",
        "seeds": "`enable_deterministic_inference=true`",
        "kv_events": "prefix caching on, one data-parallel rank",
        "lora dynamic": _ADAPTERS,
        "operation load_adapter": _ADAPTERS,
        "operation unload_adapter": _ADAPTERS,
        "priority": "`enable_priority_scheduling=true`",
        "kind embedding": "`is_embedding=true`",
    },
    untried={
        "seeds": "SGLang takes `enable_deterministic_inference` with attention kernels of a GPU only",
        "role prefill": _APART,
        "role decode": _APART,
        "handover rendezvous": _APART,
        "kind embedding": "embeddings have tests of their own",
    },
)


class SglangEngine(ProcessEngine):
    """An SGLang engine. Started once, stopped once."""

    NAME = "SGLang"
    capabilities: Capabilities

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = Capabilities()
        self._child: ChildProcess | None = None
        self._sink: Sink | None = None
        self._info: EngineInfo | None = None
        self._open: set[str] = set()
        self._metrics: EngineMetrics | None = None
        self._folder: Path | None = None

    @property
    def child_pid(self) -> int | None:
        """Return the id of the child process, None if there is none."""
        return self._child.pid if self._child is not None else None

    async def start(self, config: EngineConfig, sink: Sink) -> EngineInfo:
        self._sink = sink
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-sglang-"))  # only this user may enter it
        self._metrics = EngineMetrics(self._folder)
        if kv_events_wanted(config):
            self._kv = KvListener(self._folder, ranks=ranks(config))
        child = ChildProcess(self._take_outputs, self.declare_dead)
        try:
            order = Start(config, self._kv.config() if self._kv is not None else None)
            started = await child.start(order, {**os.environ, **self._metrics.environment()})
        except BaseException:
            await self._end(child, 0.0)
            raise
        self._processes.remember()
        self._metrics.register()
        if POOLING_KINDS & set(started.info.kinds):
            self._deafen()
        elif self._kv is not None:
            self._kv.meet()
        self._child, self._info = child, started.info
        self.capabilities = replace(started.capabilities, kv_events=self._kv is not None)
        return started.info

    async def submit(self, sequence: Sequence) -> None:
        child = self._alive()
        refuse_undeclared(self.capabilities, sequence)
        if self._info is not None and self._info.follows:
            raise UnsupportedByEngine("this is a part of an SGLang of several nodes; its first node takes requests")
        if self._info is not None and len(sequence.token_ids) >= self._info.context_length:
            raise RequestInvalid(
                f"the prompt has {len(sequence.token_ids)} tokens; this SGLang has a context of {self._info.context_length}",
                param="messages",
            )
        self._open.add(sequence.id)
        try:
            await child.call(lambda call: Submit(call, sequence))
        except BaseException:
            if sequence.id in self._open and self._death is None:  # cancelled: SGLang may have it
                child.send(Abort([sequence.id]))
            self._open.discard(sequence.id)
            raise

    async def abort(self, ids: Seq[str]) -> None:
        known = [name for name in ids if name in self._open]
        self._open.difference_update(known)
        if known and self._child is not None and self._death is None:
            self._child.send(Abort(known))

    def load(self) -> Load:
        if self._child is None or self._info is None:
            return Load()
        load = self._child.load
        return load if self._open or load.running else Load(blocks_total=self._info.blocks)

    async def pool(self, item: PoolItem) -> Pooled:
        child = self._alive()
        self._open.add(item.id)
        try:
            vector, cached = await child.call(lambda call: PoolInput(call, item))
        except asyncio.CancelledError:
            await self.abort([item.id])
            raise
        finally:
            self._open.discard(item.id)
        return Pooled(bytes(vector), int(cached))

    async def control(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        result = await self._alive().call(lambda call: Control(call, op, dict(args)))
        return result if isinstance(result, dict) else {"result": result}

    async def stop(self, grace_s: float) -> None:
        child, self._child = self._child, None
        self._open.clear()
        if child is not None:
            self._processes.remember()
            await self._end(child, grace_s)

    async def _end(self, child: ChildProcess, grace_s: float) -> None:
        self._processes.remember()
        await child.stop(grace_s)
        await self._kill_processes(quiet=not grace_s)
        self._deafen()
        if self._metrics is not None:
            self._metrics.unregister()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _alive(self) -> ChildProcess:
        self.check_alive()
        if self._child is None:
            raise EngineDead("the engine is not running")
        return self._child

    def _take_outputs(self, outputs: list[Output]) -> None:
        """Hand the outputs of a step to the sink, without those of aborted sequences."""
        wanted = [output for output in outputs if output.id in self._open]
        for output in wanted:
            if output.finish is not None or output.fault is not None:
                self._open.discard(output.id)
        if wanted and self._sink is not None:
            self._sink(wanted)

    def dropped(self) -> int:
        dropped = len(self._open)
        self._open.clear()
        return dropped
