"""Settings of the engine, as annotated fields: an unknown name is an error, as with the real classes."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, Literal

from tensorrt_llm.version import IS_1_3

NonNegativeInt = int  # a name of pydantic's, as the published source has it


class StrictModel:
    """A record with a fixed set of fields. `model_fields` names them, as a pydantic model does."""

    model_fields: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        own = {name: getattr(cls, name) for name in inspect.get_annotations(cls)}
        cls.model_fields = {**cls.model_fields, **own}

    def __init__(self, **values: Any) -> None:
        for name in values:
            if name not in self.model_fields:
                raise ValueError(f"1 validation error for {type(self).__name__}: {name}: Extra inputs are not permitted")
        for name, default in self.model_fields.items():
            setattr(self, name, values.get(name, default))


class KvCacheConfig(StrictModel):
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = 0.9
    host_cache_size: int | None = None
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    attention_dp_events_gather_period_ms: int = 5
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: NonNegativeInt = 0
    dtype: str = "auto"
    mamba_ssm_cache_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    tokens_per_block: int = 32
    if IS_1_3:
        disk_cache_size: int | None = None
        disk_cache_path: str | None = None
        kv_events_config: object | None = None
    else:
        onboard_blocks: bool = True

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        size = self.tokens_per_block
        if not isinstance(size, int) or size < 2 or size & (size - 1):
            raise ValueError(f"tokens_per_block is {size}, not a power of two above 1")


class CacheTransceiverConfig(StrictModel):
    backend: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"] | None = None
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: int | None = 60_000 if IS_1_3 else None
    kv_transfer_sender_future_timeout_ms: int | None = 1000
    if IS_1_3:
        transceiver_runtime: str | None = None

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if self.backend not in (None, "DEFAULT", "UCX", "NIXL", "MPI", "MOONCAKE"):
            raise ValueError(f"backend is {self.backend!r}")


class BaseLlmArgs(StrictModel):
    model: str | object | None = None
    tokenizer: str | object | None = None
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    model_kwargs: dict[str, Any] | None = None
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    gpus_per_node: int | None = None
    moe_cluster_parallel_size: int | None = None
    moe_tensor_parallel_size: int | None = None
    moe_expert_parallel_size: int | None = None
    enable_attention_dp: bool = False
    load_format: Literal["auto", "dummy"] = "auto"
    enable_lora: bool = False
    lora_config: object | None = None
    kv_cache_config: Any = None
    enable_chunked_prefill: bool = False
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    batched_logits_processor: object | None = None
    peft_cache_config: object | None = None
    scheduler_config: object | None = None
    cache_transceiver_config: CacheTransceiverConfig | None = None
    speculative_config: object | None = None
    max_batch_size: int | None = 2048
    max_input_len: int | None = 1024
    max_seq_len: int | None = None
    max_beam_width: int | None = 1
    max_num_tokens: int | None = 8192
    backend: str | None = "pytorch"
    return_perf_metrics: bool = False
    if IS_1_3:
        env_overrides: dict[str, str] | None = None


class TorchLlmArgs(BaseLlmArgs):
    cuda_graph_config: object | None = None
    attention_dp_config: object | None = None
    disable_overlap_scheduler: bool = False
    moe_config: object | None = None
    attn_backend: str = "TRTLLM"
    sampler_type: str | object = "auto"
    enable_iter_perf_stats: bool = False
    enable_iter_req_stats: bool = False
    print_iter_log: bool = False
    enable_autotuner: bool = True
    stream_interval: int = 1
    kv_connector_config: object | None = None
    mm_encoder_only: bool = False
    orchestrator_type: str | None = None
    if IS_1_3:
        max_stats_len: int = 1000
        enable_sleep: bool = False

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if self.kv_cache_config is None:
            self.kv_cache_config = KvCacheConfig()
        if self.guided_decoding_backend not in (None, "xgrammar", "llguidance"):
            raise ValueError(f"guided_decoding_backend is {self.guided_decoding_backend!r}")
        if getattr(self.kv_cache_config, "kv_events_config", None) is not None:
            raise ValueError("kv_events_config has no implementation")
