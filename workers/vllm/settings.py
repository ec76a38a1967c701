"""Translates `EngineConfig` to vLLM's own settings.

The operator's settings are passed on unchanged; a name unknown to vLLM stops the start. Where nothing is given, some defaults
differ from vLLM's, nearly all of them for machines without a GPU; each is listed with its reason in docs/engines.md.
"""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace.workers.engine import EngineConfig, Role
from headrace.workers.errors import EngineError, EngineStartFailed, UnsupportedByEngine
from headrace.workers.kit import ADAPTERS_ARG, adapters_of, check_plain_types, parsed_source, read_config, unknown_adapter
from headrace.workers.model_files import weight_format
from headrace.workers.vllm.embeddings import ENCODERS_ARG, check_encoders, transfer_config
from headrace.workers.vllm.pooling import pools
from headrace.workers.vllm.transfer_connector import EXTENSION, MODE_ARG, connector_config

# Loads a worker's LoRA adapters: those of its start (`adapters={"name": "folder", …}`), and those added while it serves.
#
# Clients see each adapter as a model of its own. Adapters are loaded before they are announced, so that one that does not fit
# the model is found then, and no request waits for a file.

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the ranks that vLLM supports
_AGAIN = "\x1f"  # separates an adapter's name from the number of its earlier loads; no name has it


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter. `number` is vLLM's id, unique in an engine, from 1. `turn`: earlier loads of this name."""

    name: str
    folder: str
    rank: int
    number: int
    turn: int = 0

    def request(self) -> Any:
        """Make vLLM's `LoRARequest`.

        vLLM knows cached blocks by the adapter's name and keeps them when it is unloaded: the next one of that name must not
        find them.
        """
        from vllm.lora.request import LoRARequest

        name = f"{self.name}{_AGAIN}{self.turn}" if self.turn else self.name
        return LoRARequest(lora_name=name, lora_int_id=self.number, lora_path=self.folder)


def public_name(name: str | None) -> str | None:
    """Return the clients' name of the adapter that vLLM knows by `name`."""
    return None if name is None else name.partition(_AGAIN)[0]


def read_adapter(name: str, folder: str, number: int, turn: int = 0) -> Adapter:
    """Read an adapter from its folder. Raises EngineError if there is none, or one of a rank that vLLM does not support."""
    return Adapter(name, folder, read_config(name, folder, most_rank=_RANKS[-1]).rank, number, turn)


def lora_args(adapters: Mapping[str, Adapter]) -> dict[str, Any]:
    """Return vLLM's settings for these adapters: room for all at once, of the largest rank."""
    if not adapters:
        return {}
    most = max(adapter.rank for adapter in adapters.values())
    return {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": next(rank for rank in _RANKS if rank >= most)}


async def load_adapters(llm: Any, adapters: Mapping[str, Adapter]) -> None:
    """Load the adapters into the engine. Raises EngineStartFailed for the first that the engine refuses."""
    for adapter in adapters.values():
        try:
            await _add(llm, adapter)
        except EngineError as error:
            raise EngineStartFailed(str(error)) from error


async def _add(llm: Any, adapter: Adapter) -> None:
    try:
        loaded = await llm.add_lora(adapter.request())
    except Exception as error:
        raise EngineError(f"vLLM cannot load the adapter {adapter.name!r} from {adapter.folder}: {error}") from error
    if not loaded:
        raise EngineError(f"vLLM did not load the adapter {adapter.name!r} from {adapter.folder}")


class Adapters:
    def __init__(self, llm: Any, started_with: Mapping[str, Adapter], *, most_rank: int | None) -> None:
        """`most_rank`: None for an engine that was started without room for adapters."""
        self._llm = llm
        self._there = dict(started_with)
        self._most_rank = most_rank
        self._last = len(self._there)
        self._turns = dict.fromkeys(self._there, 1)  # how often each name was loaded

    @property
    def changeable(self) -> bool:
        return self._most_rank is not None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._there)

    async def do(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run one of `ADAPTER_OPERATIONS`. Raises UnsupportedByEngine, EngineError."""
        if not self.changeable:
            raise UnsupportedByEngine(f"{op}: this vLLM was started without enable_lora")
        if op == "load_adapter":
            await self.load(args["name"], args["source"])
        else:
            await self.unload(args["name"])
        return {}

    async def load(self, name: str, folder: str) -> None:
        """Load an adapter; does nothing if it is loaded from this folder. Raises UnsupportedByEngine, EngineError."""
        if self._most_rank is None:
            raise UnsupportedByEngine("this vLLM was started without enable_lora")
        there = self._there.get(name)
        if there is not None and there.folder == folder:
            return
        if there is not None:
            raise EngineError(f"the adapter {name!r} is loaded from {there.folder} already; unload it first")
        adapter = read_adapter(name, folder, self._last + 1, self._turns.get(name, 0))
        if adapter.rank > self._most_rank:
            raise EngineError(f"{name!r} has rank {adapter.rank}; this vLLM was started with max_lora_rank={self._most_rank}")
        self._last += 1
        await _add(self._llm, adapter)
        self._turns[name] = adapter.turn + 1
        self._there[name] = adapter

    async def unload(self, name: str) -> None:
        """Unload an adapter; does nothing if it is not loaded. Raises EngineError."""
        adapter = self._there.pop(name, None)
        if adapter is None:
            return
        try:
            await self._llm.remove_lora(adapter.number)  # The result is false if vLLM had dropped it already.
        except Exception as error:
            raise EngineError(f"vLLM cannot unload the adapter {name!r}: {error}") from error

    def request_of(self, name: str | None) -> Any:
        """Return vLLM's request for an adapter, None for the model itself. Raises RequestInvalid for an unknown adapter."""
        if name is None:
            return None
        adapter = self._there.get(name)
        if adapter is None:
            raise unknown_adapter(name, self._there)
        return adapter.request()


# Recognises the connectors of other projects in an operator's `kv_transfer_config`, and says before the start what they lack.
#
# What is recognised is passed on unchanged, as everything else is: vLLM loads them.

LMCACHE = frozenset({"LMCacheConnectorV1", "LMCacheMPConnector"})
KVBM = frozenset({"DynamoConnector", "PdConnector"})
KVBM_MODULE = "kvbm.vllm_integration.connector"
_WRAPPERS = frozenset({"MultiConnector", "PdConnector"})

OFFLOADING = "OffloadingConnector"
_CPU_MODULE = "headrace.workers.vllm.cpu_offload"
_CPU_SPECS = {"CPUOffloadingSpec": "CpuHostSpec", "TieringOffloadingSpec": "CpuTieredSpec"}


def check_connectors(args: Mapping[str, Any], *, cpu: bool) -> None:
    """Raise EngineStartFailed for a connector whose package is not installed, or that is known not to work here."""
    if args.get("kv_offloading_size") is not None and args.get("kv_offloading_backend") == "lmcache":
        _check("LMCacheMPConnector", {}, cpu=cpu)
    for name, config in _named(args.get("kv_transfer_config")):
        _check(name, config, cpu=cpu)


def offload_without_gpu(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with which vLLM's own offloading works without a GPU; none where it is not asked for.

    Its specs refuse to start there, so the ones of `cpu_offload` take their place. All else stays as the operator gave it.
    """
    config = args.get("kv_transfer_config")
    if config is None and args.get("kv_offloading_size") is not None and args.get("kv_offloading_backend") in (None, "native"):
        config = {"kv_connector": OFFLOADING, "kv_role": "kv_both"}
    if not isinstance(config, Mapping) or config.get("kv_connector") != OFFLOADING:
        return {}
    extra = dict(config.get("kv_connector_extra_config") or {})
    if ours := _CPU_SPECS.get(extra.get("spec_name", "CPUOffloadingSpec")):
        extra |= {"spec_name": ours, "spec_module_path": _CPU_MODULE}
    return {"kv_transfer_config": {**config, "kv_connector_extra_config": extra}}


def _named(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Iterate over a connector and those inside it. What is no such configuration is left to vLLM."""
    if not isinstance(config, Mapping) or not isinstance(name := config.get("kv_connector"), str):
        return
    yield name, config
    extra = config.get("kv_connector_extra_config")
    inner = extra.get("connectors") if name in _WRAPPERS and isinstance(extra, Mapping) else ()
    for one in inner if isinstance(inner, list | tuple) else ():
        yield from _named(one)


def _check(name: str, config: Mapping[str, Any], *, cpu: bool) -> None:
    if name in LMCACHE:
        _need("lmcache", name)
        if cpu and name == "LMCacheConnectorV1":  # seen with LMCache 0.5.6
            raise EngineStartFailed(
                f"{name} does nothing without a GPU but make each request wait for a time-out; kv_offloading_size is for that"
            )
    if name in KVBM:
        if config.get("kv_connector_module_path") is None:
            raise EngineStartFailed(f"vLLM loads {name} by a path: give kv_connector_module_path={KVBM_MODULE!r} with it")
        _need("kvbm", name)


def _need(package: str, connector: str) -> None:
    if find_spec(package) is None:
        raise EngineStartFailed(
            f"{connector} is in the Python package {package}, which is not installed: pip install {package}"
        )


CPU_BLOCK_SIZE = 32
CPU_MAX_SEQUENCES = 32
CPU_KV_BYTES = 512 << 20
ENCODE_CACHE_GB = 0.25  # of processed items, of which an encode worker finds none again; vLLM's default is 4

_OURS = {"model": "--model", "served_model_name": "--served-name", "seed": "--seed"}
"""Settings with an option of their own: two places for one thing would contradict each other."""

ADDED_ARGS = (MODE_ARG, ADAPTERS_ARG, ENCODERS_ARG)
"""Settings that vLLM does not have."""


def prepare_environment(config: EngineConfig, environ: MutableMapping[str, str]) -> None:
    """Set the variables vLLM reads at import, unless the operator has set them. Must run before `import vllm`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    talks = config.args.get("disable_log_stats") is False or config.args.get("enable_log_requests") is True
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "INFO" if talks else "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        # Forked children would inherit the broker's sockets and hold them open after this process died.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Several engines may share the cores; vLLM's binding would pin all of them to the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(cores),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if Path(config.model).is_dir():
        defaults["HF_HUB_OFFLINE"] = "1"
    for name, value in defaults.items():
        environ.setdefault(name, value)


_EXTERNAL_RANKS = frozenset(
    {
        "data_parallel_rank",
        "data_parallel_start_rank",
        "data_parallel_size_local",
        "data_parallel_address",
        "data_parallel_external_lb",
        "data_parallel_hybrid_lb",
    }
)


def kv_events_wanted(config: EngineConfig) -> bool:
    """Return whether to listen to vLLM's KV events.

    Not if the operator configured them, if this engine has some ranks of several, or if there is no prefix cache to route by.
    """
    if config.role is Role.ENCODE:
        return False
    args = config.args
    settled = "kv_events_config" in args or not args.get("enable_prefix_caching", True) or pools(config)
    alone = int(args.get("data_parallel_size") or 1) == ranks(config)
    return not settled and (alone or external_rank(config) is not None)


def external_rank(config: EngineConfig) -> int | None:
    """Return which data-parallel rank this engine is, if it is one of several engines with a rank each."""
    args = config.args
    several = args.get("data_parallel_hybrid_lb") or int(args.get("data_parallel_size_local") or 1) > 1
    return None if several or args.get("data_parallel_rank") is None else int(args["data_parallel_rank"])


def ranks(config: EngineConfig) -> int:
    """Return the number of data-parallel ranks that this engine balances: one if others, or other machines, run the rest."""
    return 1 if _EXTERNAL_RANKS & config.args.keys() else int(config.args.get("data_parallel_size") or 1)


def engine_args(
    config: EngineConfig,
    *,
    kv_events: Mapping[str, Any] | None = None,
    items: Path | None = None,
) -> Any:
    """Build vLLM's `AsyncEngineArgs`. Raises EngineStartFailed for a setting that vLLM does not have or refuses.

    `kv_events`: vLLM's settings for publishing its KV events. `items`: the folder through which embeddings
    of media pass, if they do.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    check_names(config.args, [*(field.name for field in fields(AsyncEngineArgs)), *ADDED_ARGS])
    given = {name: value for name, value in config.args.items() if name not in ADDED_ARGS}
    check_connectors(given, cpu=current_platform.is_cpu())
    if current_platform.is_cpu() and config.role is Role.AGGREGATED:
        given |= offload_without_gpu(given)
    transfer = connector_config(config, cpu=current_platform.is_cpu())
    args: dict[str, Any] = {
        "model": config.model,
        "served_model_name": config.served_name,
        "seed": config.seed,
        "disable_log_stats": True,  # no log lines; its Prometheus series are shown, and load() has its numbers, all the same
        "enable_prefix_caching": None if pools(config) else True,  # whether a model that pools can use it, vLLM knows
        "enable_logging_iteration_details": True,  # not to log them: load reports tell what a step did
    }
    args |= weight_format(config.model, given)
    args |= lora_args(adapters_of(config, read_adapter))
    if kv_events is not None:
        from vllm.config.kv_events import KVEventsConfig

        args["kv_events_config"] = KVEventsConfig(**kv_events)
    if transfer is not None or given.get("kv_transfer_config") is not None:
        args["worker_extension_cls"] = EXTENSION
    if transfer is not None:
        given.pop("kv_transfer_config", None)  # null says that there is no other
        from vllm.config.kv_transfer import KVTransferConfig

        args["kv_transfer_config"] = KVTransferConfig(**transfer)
    if items is not None:
        from vllm.config.ec_transfer import ECTransferConfig

        args["ec_transfer_config"] = ECTransferConfig(**transfer_config(config.role, items))
    if config.role is Role.ENCODE:  # each item is its own and seen once: there is nothing to keep
        args |= {"enable_prefix_caching": False, "mm_processor_cache_gb": ENCODE_CACHE_GB}
    if current_platform.is_cpu():
        args |= {"block_size": CPU_BLOCK_SIZE, "max_num_seqs": CPU_MAX_SEQUENCES, "enforce_eager": True}
    try:
        return AsyncEngineArgs(**args | given)
    except (TypeError, ValueError) as error:
        raise EngineStartFailed(f"vLLM refuses its settings: {error}") from error


def check_names(args: Mapping[str, Any], known: list[str]) -> None:
    """Raise EngineStartFailed for the first setting not in `known`, naming what is spelt like it."""
    for name in args:
        if name in _OURS:
            raise EngineStartFailed(f"give {name!r} as {_OURS[name]}, not as an engine setting")
        if name not in known:
            close = difflib.get_close_matches(name.replace("-", "_"), known, n=3, cutoff=0.6)
            hint = f"; close to it: {', '.join(close)}" if close else ""
            raise EngineStartFailed(f"vLLM has no setting {name!r}{hint}")


def prepare_children(vllm_config: Any, environ: MutableMapping[str, str]) -> None:
    """Set what only the engine's processes read, once it is known what they will run. Must run before they are started.

    Some of vLLM's sampling code is compiled on first use even in eager mode.  Without a GPU that takes a C++ compiler and
    stalled the first request for log probabilities, and all others with it, for 17 s.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and vllm_config.model_config.enforce_eager:
        environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def computes_in_core(config: EngineConfig, environ: Mapping[str, str], *, ranks: int) -> bool:
    """Return whether vLLM's core computes by itself without a GPU; else it has a process for each rank.

    vLLM wants those so that it can bind their threads to cores.  Where nothing is bound and one rank is all there is, such a
    process gains nothing: it imports vLLM once more, which takes its time and memory, and each step goes to it and back.
    """
    unbound = environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind"
    return unbound and ranks == 1 and config.args.get("distributed_executor_backend") is None


def size_kv_cache(vllm_config: Any) -> None:
    """Set the KV cache size without a GPU and a setting: 512 MiB or two full sequences, at most half of the free memory."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or vllm_config.cache_config.kv_cache_memory_bytes is not None:
        return
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    heads = model.get_num_kv_heads(parallel) * model.get_head_size()
    per_token = 2 * model.get_num_layers(parallel) * heads * model.dtype.itemsize
    wanted = max(CPU_KV_BYTES, 2 * per_token * model.max_model_len)
    vllm_config.cache_config.kv_cache_memory_bytes = max(CPU_KV_BYTES, min(wanted, _free_memory() // 2))


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


_SOURCE = Path("engine", "arg_utils.py")
_CLASSES = frozenset({"EngineArgs", "AsyncEngineArgs"})


def check_arguments(args: Mapping[str, Any]) -> None:
    """Raise EngineStartFailed for a setting that vLLM does not have or a value of another plain type.

    What cannot be said by the source alone passes: vLLM decides about it when it starts.
    """
    known = vllm_settings() if args else {}
    if not known:
        return
    check_names(args, [*known, *ADDED_ARGS])
    check_plain_types("vLLM", args, known)
    check_encoders(args)


def vllm_settings(package: Path | None = None) -> dict[str, str]:
    """Return name → annotation of the settings of the vLLM in the folder `package`, by default the one that is installed.

    Empty where there is none, or where its source is not as expected.
    """
    tree = parsed_source("vllm", _SOURCE, package)
    if tree is None:
        return {}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in _CLASSES]
    if {node.name for node in classes} != _CLASSES:
        return {}
    fields = [field for node in classes for field in node.body if isinstance(field, ast.AnnAssign)]
    return {field.target.id: ast.unparse(field.annotation) for field in fields if isinstance(field.target, ast.Name)}
