"""Starts vLLM: settings, environment, the blocking construction, and the description of the started engine."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import structlog

from headrace.workers.blocking import run_in_thread
from headrace.workers.bundled_model import growth_reported
from headrace.workers.engine import EngineConfig, EngineInfo, Role, several
from headrace.workers.errors import EngineStartFailed, WorkerError
from headrace.workers.kit import not_installed
from headrace.workers.lora import Adapters, adapters_of
from headrace.workers.model_files import hub_folder, tokenizer_folder
from headrace.workers.vllm.convert import eos_ids
from headrace.workers.vllm.embeddings import encoder_word
from headrace.workers.vllm.kv_transfer import side_channel
from headrace.workers.vllm.load_meter import LoadMeter, no_prometheus, shows_metrics
from headrace.workers.vllm.media import NO_MEDIA, MediaSupport, offered_media
from headrace.workers.vllm.pooling import class_labels, pooling_kinds
from headrace.workers.vllm.settings import (
    MOST_RANK,
    computes_in_core,
    engine_args,
    loaded_adapters,
    prepare_children,
    prepare_environment,
    ranks,
    size_kv_cache,
)
from headrace.workers.vllm.transfer_connector import ConnectorChoice, check_role, describe_transfer, handover_word

# Finds the package that vLLM's code for a model lacks. vLLM itself reports only that the model "failed to be inspected".

_UNINSPECTED = re.compile(r"Model architectures \[(?P<names>[^]]*)\] failed to be inspected")
_TORCHVISION = "torchvision"


def missing_code(complaint: str) -> str | None:
    """Return a better text for vLLM's error about code that it cannot import, or None for any other error."""
    found = _UNINSPECTED.search(complaint)
    if found is None:
        return None
    for name in re.findall(r"[\w.]+", found["names"]):
        if (why := _why_not(name)) is not None:
            return f"vLLM's code for {name} cannot be used: {why}"
    return None


def _why_not(architecture: str) -> str | None:
    from vllm.model_executor.models import ModelRegistry

    registered = ModelRegistry.models.get(architecture)
    module = getattr(registered, "module_name", None)
    if module is None:
        return None
    try:
        import_module(module)
    except ImportError as error:
        return explained(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def explained(error: ImportError) -> str:
    """Return the packages to install, without the CUDA build that a package index offers by default."""
    if error.name is None:
        return str(error)
    module = error.name.partition(".")[0]
    if module != _TORCHVISION:
        return f"the Python package that has the module {module!r} is not installed"
    return (
        f"torchvision is not installed. Install the build of it that belongs to this PyTorch ({_torch()}); where there is no "
        'GPU that is the CPU build, from the index that TORCH_INDEX_URL names (docs/engines.md, "Images, videos and sounds")'
    )


def _torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "not installed either"


# Manages the folder for the local sockets of a vLLM, and removes it with the engine: vLLM would leave four per start behind.
#
# A killed worker leaves its folder, and the next worker to start removes it. A living worker holds a lock in its folder,
# which also works between containers that share the directory, where process ids mean nothing.

PREFIX = "headrace-vllm-"
BASE = "VLLM_RPC_BASE_PATH"
LONGEST = 107 - 37  # the kernel's limit for the path of a socket, less vLLM's name for one
_LOCK = "lock"


class SocketFolder:
    """A folder that the constructor creates and only this user can enter."""

    def __init__(self, place: Path | None = None) -> None:
        place = place or Path(tempfile.gettempdir())
        _remove_abandoned(place)
        made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=place))
        self._lock = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(place / made.name.removeprefix("."))  # by this name it is always locked

    @contextmanager
    def given(self, environ: MutableMapping[str, str]) -> Iterator[None]:
        """Have vLLM create its sockets here while it starts, unless the operator set a place or the path is too long."""
        if BASE in environ or len(os.fsencode(self.path)) > LONGEST:
            yield
            return
        environ[BASE] = str(self.path)
        try:
            yield
        finally:
            environ.pop(BASE, None)

    def remove(self) -> None:
        """Remove the folder. Does nothing if it is gone."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(place: Path) -> None:
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's; or another process removes it too, or it is in use
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


# vLLM's core as a fork of the worker, where nothing is computed on a GPU.
#
# A core that is spawned imports for nine seconds what the worker has just imported, and holds all of it once more in memory.
# A fork has it. What else it would have of the worker is let go: TCP connections, which the peer would take for alive after
# the worker has closed them; event loops, whose files in the kernel are shared with those of the worker; and the pipe that
# tells the worker of signals.
#
# It is forked from the thread that builds vLLM, which has computed nothing yet, or only by itself: PyTorch's threads do not
# survive a fork, and a core that has them in its books waits for them for ever. Processors of some models compute before the
# fork, so until then this thread gets no help. From the fork on both sides have all of it.

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
CHOSEN = os.environ.get(METHOD)
"""The operator's setting, read before this module changes it."""

OWN_THREADS = "OMP_NUM_THREADS"
"""The variable by which vLLM sets PyTorch's threads around its calls of processors."""

_forking: ContextVar[_Alone | None] = ContextVar("forking", default=None)
"""What a thread that starts vLLM's processes computes with; None in all others."""


def may_fork(vllm_config: Any, *, cpu: bool, chosen: str | None = CHOSEN) -> bool:
    """Return whether the core can be forked.

    It can on Linux without a GPU, if it is the only one, computes by itself, and the operator chose nothing else.
    """
    parallel, media = vllm_config.parallel_config, vllm_config.model_config.multimodal_config
    return (
        sys.platform == "linux"
        and cpu
        and chosen in (None, "fork")
        and parallel.distributed_executor_backend == "uni"
        and parallel.data_parallel_size == 1
        and (media is None or media.mm_tensor_ipc != "torch_shm")  # vLLM refuses this together with a fork.
    )


@contextmanager
def forked_core(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Have vLLM fork the processes that this thread starts, and have them close the worker's shared descriptors."""
    _register()
    _quieten_dynamo(environ)
    alone = _Alone(environ)
    environ[METHOD], before = "fork", _forking.set(alone)
    try:
        yield
    finally:
        alone.end()
        environ[METHOD] = "spawn"
        _forking.reset(before)


class _Alone:
    """A thread that computes by itself, without PyTorch's other threads, until it ends that."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._torch: Any = sys.modules.get("torch")
        self._threads = self._torch.get_num_threads() if self._torch is not None else 1
        self._environ, self._told = environ, environ.get(OWN_THREADS)
        self._ended = False
        environ[OWN_THREADS] = "1"
        self._compute_with(1)

    def end(self) -> None:
        """Compute with as many threads as before. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        if self._told is None:
            self._environ.pop(OWN_THREADS, None)
        else:
            self._environ[OWN_THREADS] = self._told
        self._compute_with(self._threads)

    def _compute_with(self, threads: int) -> None:
        if self._torch is not None:
            self._torch.set_num_threads(threads)


@cache
def _register() -> None:
    os.register_at_fork(after_in_parent=_compute_on, after_in_child=_let_go)


def _quieten_dynamo(environ: Mapping[str, str]) -> None:
    """Set in PyTorch what a spawned core would read from its environment at import."""
    if environ.get("TORCHDYNAMO_DISABLE") == "1":
        import torch._dynamo.config

        torch._dynamo.config.disable = True


def _compute_on() -> None:
    alone = _forking.get()
    if alone is not None:
        alone.end()


def _let_go() -> None:
    """Close everything that the kernel shares with the worker, and handle signals as a new process does. Runs in the child.

    The descriptor numbers stay in use, because objects in this process still hold them.
    """
    if _forking.get() is None:
        return
    _compute_on()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        if _is_the_workers(int(name)):
            os.dup2(nothing, int(name), inheritable=False)
    os.close(nothing)


def _is_the_workers(number: int) -> bool:
    try:
        kind = os.readlink(f"/proc/self/fd/{number}")
        if kind == "anon_inode:[eventpoll]":
            return True
        if not kind.startswith("socket:"):
            return False
        found = socket.socket(fileno=os.dup(number))
    except OSError:  # the folder's own descriptor, which is gone
        return False
    with found:
        return found.family in (socket.AF_INET, socket.AF_INET6)


_log = structlog.get_logger()

_DOWNLOAD_STEP_MB = 50.0
_DOWNLOAD_LOOK_S = 1.0

NO_DEVICE = (
    "vLLM {version} finds nothing to compute on: it is built for GPUs, and none can be used. Does `nvidia-smi` list one? "
    "For a machine without a GPU there is the CPU build: `make clean`, then `make install ENGINE=vllm`"
)
POOLING_TASKS = frozenset({"embed", "classify", "token_embed", "token_classify"})


@dataclass(frozen=True, slots=True)
class Started:
    """A running AsyncLLM, its description, and its way to move blocks, if it can."""

    llm: Any
    info: EngineInfo
    transfer: ConnectorChoice | None = None
    adapters: Adapters | None = None  # None for an engine that generates nothing
    offer: MediaSupport = NO_MEDIA
    cpu: bool = False  # it computes without a GPU
    logs_stats: bool = False  # log lines of its statistics were asked for
    encodes: bool = False  # it runs encoders for other workers, and no language model


async def start_vllm(
    config: EngineConfig,
    meter: LoadMeter,
    kv_events: Mapping[str, Any] | None = None,
    *,
    items: Path | None = None,
) -> Started:
    """Import vLLM, load the model and wait until the core is ready. Raises EngineStartFailed.

    `kv_events`: where vLLM is to publish its KV events. `items`: the
    folder through which embeddings of media pass, if they do.
    """
    adapters = adapters_of(config, most_rank=MOST_RANK)
    prepare_environment(config, os.environ)
    with _download_reported(config):
        started = await run_in_thread(lambda: _build(config, meter, kv_events, items), name="vllm-start")
    # The first call binds vLLM's sockets to this event loop and caches the answer that every later request needs.
    tasks = await started.llm.get_supported_tasks()
    if "generate" in tasks:
        offer = await offered_media(started.llm)
        # A hand-over counts tokens, and of an item whose length depends on it only vLLM knows how many these are.
        known = all(slot.tokens for slot in offer.slots.values())
        info = replace(started.info, media=offer.slots, hands_over_media=bool(started.info.handover) and known)
        started = replace(started, info=info, offer=offer)
        lora = started.llm.vllm_config.lora_config
        running = await loaded_adapters(started.llm, adapters, most_rank=lora.max_lora_rank if lora is not None else None)
        return replace(started, info=replace(started.info, adapters=running.names), adapters=running)
    model = started.llm.vllm_config.model_config
    if not POOLING_TASKS & set(tasks):
        raise EngineStartFailed(f"{config.model} does not generate text; vLLM offers: {', '.join(tasks) or 'nothing'}")
    return replace(started, info=replace(started.info, kinds=pooling_kinds(model, tasks), labels=class_labels(model)))


def _download_reported(config: EngineConfig) -> AbstractContextManager[None]:
    """Log how much of a model has arrived while it comes from its hub: `model.downloading`."""
    folder = hub_folder(config.model, config.args, os.environ)
    if folder is None:
        return nullcontext()

    def tell(arrived_mb: float | None) -> None:
        arrived = {"done": True} if arrived_mb is None else {"arrived_mb": round(arrived_mb)}
        _log.info("model.downloading", model=config.model, **arrived)

    return growth_reported(folder, tell, step_mb=_DOWNLOAD_STEP_MB, every_s=_DOWNLOAD_LOOK_S)


def _build(config: EngineConfig, meter: LoadMeter, kv_events: Mapping[str, Any] | None, items: Path | None) -> Started:
    try:
        import vllm
    except ImportError as error:
        raise not_installed("vLLM", error, "`make install ENGINE=vllm`") from error
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    if current_platform.is_unspecified():  # vLLM itself would only say that a "device string must not be empty"
        raise EngineStartFailed(NO_DEVICE.format(version=vllm.__version__))
    try:
        args = engine_args(config, kv_events=kv_events, items=items)
        vllm_config = args.create_engine_config()
        size_kv_cache(vllm_config)
        parallel = vllm_config.parallel_config
        if current_platform.is_cpu() and computes_in_core(config, os.environ, ranks=parallel.world_size):
            parallel.distributed_executor_backend = "uni"
        prepare_children(vllm_config, os.environ)
        transfer = describe_transfer(vllm_config)
        check_role(config.role, transfer, getattr(vllm_config.kv_transfer_config, "kv_connector", None))
        with (
            side_channel(os.environ, host=config.peer_host, ranks=parallel.data_parallel_size) if transfer else nullcontext(),
            forked_core(os.environ) if may_fork(vllm_config, cpu=current_platform.is_cpu()) else nullcontext(),
        ):
            llm = AsyncLLM.from_vllm_config(
                vllm_config,
                stat_loggers=[meter.factory(), *([] if shows_metrics(config.args) else [no_prometheus()])],
                disable_log_stats=args.disable_log_stats,
                enable_log_requests=args.enable_log_requests,
            )
    except WorkerError:
        raise
    except Exception as error:
        told = missing_code(str(error)) or str(error)
        raise EngineStartFailed(f"vLLM could not start {config.model}: {told}") from error
    info = _describe(llm, vllm.__version__, transfer, ranks=ranks(config))
    if items is not None:
        info = replace(info, encoder=_encoder(config, info, current_platform.device_type))
    return Started(llm, info, transfer, cpu=current_platform.is_cpu(), encodes=config.role is Role.ENCODE)


def _encoder(config: EngineConfig, info: EngineInfo, device: str) -> str:
    return encoder_word(config, version=info.version, dtype=str(info.extra["dtype"]), device=device)


def _describe(llm: Any, version: str, transfer: ConnectorChoice | None, *, ranks: int) -> EngineInfo:
    vllm_config = llm.vllm_config
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return EngineInfo(
        engine="vllm",
        version=version,
        tokenizer_dir=str(tokenizer_folder(model.tokenizer, model.tokenizer_revision, llm.renderer.get_tokenizer)),
        context_length=model.max_model_len,
        block_size=cache.block_size,
        blocks=cache.num_gpu_blocks or 0,  # an encoder has none
        slots=vllm_config.scheduler_config.max_num_seqs * ranks,
        ranks=ranks,
        parallel=_parallel(vllm_config.parallel_config),
        vocab_size=model.get_vocab_size(),
        eos_token_ids=eos_ids(llm),
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        handover=handover_word(transfer.mode, version, vllm_config) if transfer else "",
        lease_s=transfer.lease_s if transfer else 0.0,
        lends=transfer is not None and transfer.lends,
        prompt_embeds=bool(model.enable_prompt_embeds),
        default_sampling=model.get_diff_sampling_param(),
        extra={
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv_cache_tokens": cache.block_size * (cache.num_gpu_blocks or 0),
        },
    )


def _parallel(parallel: Any) -> dict[str, int]:
    """Return the ranks that share the model. Experts are spread over all ranks of layers and data, or over none."""
    tensor, data = parallel.tensor_parallel_size, parallel.data_parallel_size
    experts = tensor * data if parallel.enable_expert_parallel else 1
    return several(tensor=tensor, pipeline=parallel.pipeline_parallel_size, expert=experts)
