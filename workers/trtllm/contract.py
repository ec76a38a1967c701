"""Compares the installed TensorRT-LLM with the API that the adapter uses: names, arguments and fields.

The table was written from the published sources and documentation of TensorRT-LLM 1.2 and of the release candidates of 1.3;
nothing of it has run against a GPU here. What differs is named at the start, in one sentence per difference, before a model is
loaded.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import structlog

from headrace.workers.errors import EngineStartFailed

LINES = ("1.2", "1.3")
"""The release lines that the table was written for."""


@dataclass(frozen=True, slots=True)
class Used:
    """Names that the adapter uses of one object: arguments of a callable, fields of a record, or members of a class."""

    module: str
    path: str
    kind: str  # "arguments", "fields" or "members"
    names: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"{self.module}.{self.path}"


_API = "tensorrt_llm.llmapi"


def _used(module: str, path: str, kind: str, names: str) -> Used:
    return Used(module, path, kind, tuple(names.split()))


USED: tuple[Used, ...] = (
    _used(_API, "LLM", "arguments", "model"),
    _used(_API, "LLM", "members", "generate_async get_stats_async get_kv_cache_events_async shutdown"),
    _used(
        _API,
        "LLM.generate_async",
        "arguments",
        "inputs sampling_params lora_request streaming disaggregated_params scheduling_params cache_salt",
    ),
    _used(_API, "LLM.get_stats_async", "arguments", "timeout"),
    _used(_API, "LLM.get_kv_cache_events_async", "arguments", "timeout"),
    _used(_API, "RequestOutput", "members", "abort aresult outputs __aiter__ __anext__"),
    _used(_API, "CompletionOutput", "fields", "token_ids logprobs finish_reason stop_reason disaggregated_params"),
    _used(_API, "RequestError", "members", ""),
    _used(
        "tensorrt_llm.llmapi.llm_args",
        "TorchLlmArgs",
        "fields",
        "cache_transceiver_config context_parallel_size disable_overlap_scheduler enable_attention_dp enable_chunked_prefill "
        "enable_iter_perf_stats guided_decoding_backend kv_cache_config lora_config max_batch_size max_num_tokens max_seq_len "
        "pipeline_parallel_size tensor_parallel_size",
    ),
    _used(
        _API,
        "KvCacheConfig",
        "fields",
        "enable_block_reuse event_buffer_max_size host_cache_size max_tokens tokens_per_block",
    ),
    _used(_API, "CacheTransceiverConfig", "fields", "backend kv_transfer_timeout_ms"),
    _used(
        _API,
        "SamplingParams",
        "fields",
        "bad detokenize embedding_bias end_id frequency_penalty guided_decoding ignore_eos include_stop_str_in_output "
        "logits_processor logprobs max_tokens min_p min_tokens pad_id presence_penalty repetition_penalty "
        "return_context_logits return_generation_logits seed stop_token_ids temperature top_k top_p",
    ),
    _used(_API, "GuidedDecodingParams", "fields", "grammar json json_object regex structural_tag"),
    _used(_API, "DisaggregatedParams", "fields", "ctx_request_id draft_tokens first_gen_tokens opaque_state request_type"),
    _used(_API, "LoRARequest", "fields", "lora_int_id lora_name lora_path"),
    _used("tensorrt_llm.lora_helper", "LoraConfig", "fields", "lora_dir max_cpu_loras max_lora_rank max_loras"),
    _used("tensorrt_llm.scheduling_params", "SchedulingParams", "fields", "attention_dp_rank attention_dp_relax"),
)


def differences(used: tuple[Used, ...] = USED, load: Callable[[str], Any] = importlib.import_module) -> list[str]:
    return [sentence for one in used for sentence in _differences(one, load)]


def release_line(version: str) -> str:
    """Return the release line of a version: "1.2" for "1.2.1", "1.3" for "1.3.0rc24"."""
    return ".".join(version.split(".")[:2])


def _differences(used: Used, load: Callable[[str], Any]) -> Iterator[str]:
    try:
        found = load(used.module)
    except ImportError as error:
        yield f"the module {used.module} cannot be imported: {error}."
        return
    for name in used.path.split("."):
        if not hasattr(found, name):
            yield f"{used.label} does not exist."
            return
        found = getattr(found, name)
    if used.kind == "members":
        for name in used.names:
            if not hasattr(found, name):
                yield f"{used.label} has no member {name!r}."
        return
    known = _fields(found) if used.kind == "fields" else _arguments(found)
    if known is None:
        return
    what = "field" if used.kind == "fields" else "argument"
    for name in used.names:
        if name not in known:
            yield f"{used.label} has no {what} {name!r}."


def _fields(record: Any) -> frozenset[str] | None:
    """Return the fields of a dataclass or a pydantic model; of another class the arguments that make one."""
    if dataclasses.is_dataclass(record):
        return frozenset(field.name for field in dataclasses.fields(record))
    fields = getattr(record, "model_fields", None)
    return frozenset(fields) if fields is not None else _arguments(record)


def _arguments(function: Any) -> frozenset[str] | None:
    """Return the arguments that a callable names; None if it does not say."""
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def takes(function: Any, name: str) -> bool:
    """Return whether a callable names this argument. For what later release lines have and earlier ones lack."""
    return name in (_arguments(function) or frozenset())


_log = structlog.get_logger()

PACKAGE = "tensorrt_llm"
HOW_TO_INSTALL = (
    "It runs on NVIDIA GPUs only. Its wheels are on NVIDIA's package index, not on PyPI, which has only a stub that points "
    "there: use NVIDIA's container, or on a machine with CUDA `pip install 'headrace[trtllm]'` with NVIDIA's index as "
    "--extra-index-url"
)


@dataclass(frozen=True, slots=True)
class Installed:
    """The installed package: its API module, its version, and what its release line can do."""

    api: Any  # tensorrt_llm.llmapi
    version: str
    priority: bool  # requests have a priority (1.3)

    @property
    def line(self) -> str:
        return release_line(self.version)


def missing_here(environ: Mapping[str, str] | None = None, *, library: Callable[[str], object] = ctypes.CDLL) -> list[str]:
    """Return the requirements of TensorRT-LLM that this machine lacks, a sentence each. Does not import it."""
    missing = []
    path = environ.get("PATH") if environ is not None else None
    if shutil.which("nvidia-smi", path=path) is None:
        missing.append("There is no NVIDIA driver (nvidia-smi is not found).")
    try:
        library("libcuda.so.1")
    except OSError:
        missing.append("There is no CUDA driver library (libcuda.so.1 cannot be loaded).")
    if find_spec(PACKAGE) is None:
        missing.append(f"The Python package {PACKAGE} is not installed.")
    return missing


def check_package() -> None:
    """Raise EngineStartFailed, naming what is missing, where TensorRT-LLM is not installed. Imports nothing of it."""
    if find_spec(PACKAGE) is None:
        raise EngineStartFailed(f"TensorRT-LLM cannot run here. {' '.join(missing_here())} {HOW_TO_INSTALL}")


def load_installed() -> Installed:
    """Import TensorRT-LLM and compare it with what the adapter uses. Takes seconds. Raises EngineStartFailed."""
    check_package()
    try:
        import tensorrt_llm
        import tensorrt_llm.llmapi as api
    except Exception as error:  # it loads CUDA libraries, which fail in many ways
        lacking = " ".join(missing_here())
        raise EngineStartFailed(
            f"TensorRT-LLM is installed but cannot be imported ({type(error).__name__}: {error}). {lacking} {HOW_TO_INSTALL}"
        ) from error
    version = str(tensorrt_llm.__version__)
    if found := differences():
        raise EngineStartFailed(
            f"TensorRT-LLM {version} differs from the API that Headrace uses (written for {' and '.join(LINES)}): "
            + " ".join(found)
        )
    if release_line(version) not in LINES:
        _log.warning("engine.version_unknown", engine="trtllm", version=version, written_for=LINES)
    return Installed(api, version, priority=takes(api.LLM.generate_async, "priority"))
