"""Settings of the engine: an unknown name is an error, as with the real classes."""

from __future__ import annotations

from typing import Any, ClassVar

from tensorrt_llm.version import IS_1_3


class StrictModel:
    """A record with a fixed set of fields. `model_fields` names them, as a pydantic model does."""

    model_fields: ClassVar[dict[str, Any]] = {}

    def __init__(self, **values: Any) -> None:
        for name in values:
            if name not in self.model_fields:
                raise ValueError(f"1 validation error for {type(self).__name__}: {name}: Extra inputs are not permitted")
        for name, default in self.model_fields.items():
            setattr(self, name, values.get(name, default))


class KvCacheConfig(StrictModel):
    model_fields = {
        "enable_block_reuse": True,
        "max_tokens": None,
        "max_attention_window": None,
        "sink_token_length": None,
        "free_gpu_memory_fraction": 0.9,
        "host_cache_size": None,
        "cross_kv_cache_fraction": None,
        "secondary_offload_min_priority": None,
        "event_buffer_max_size": 0,
        "attention_dp_events_gather_period_ms": 5,
        "enable_partial_reuse": True,
        "copy_on_partial_reuse": True,
        "use_uvm": False,
        "max_gpu_total_bytes": 0,
        "dtype": "auto",
        "mamba_ssm_cache_dtype": "auto",
        "tokens_per_block": 32,
        **(
            {"disk_cache_size": None, "disk_cache_path": None, "kv_events_config": None} if IS_1_3 else {"onboard_blocks": True}
        ),
    }

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        size = self.tokens_per_block  # type: ignore[attr-defined]
        if not isinstance(size, int) or size < 2 or size & (size - 1):
            raise ValueError(f"tokens_per_block is {size}, not a power of two above 1")


class CacheTransceiverConfig(StrictModel):
    model_fields = {
        "backend": None,
        "max_tokens_in_buffer": None,
        "kv_transfer_timeout_ms": 60_000 if IS_1_3 else None,
        "kv_transfer_sender_future_timeout_ms": 1000,
        **({"transceiver_runtime": None} if IS_1_3 else {}),
    }

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        backend = self.backend  # type: ignore[attr-defined]
        if backend not in (None, "DEFAULT", "UCX", "NIXL", "MPI", "MOONCAKE"):
            raise ValueError(f"backend is {backend!r}")


class TorchLlmArgs(StrictModel):
    model_fields = {
        "model": None,
        "tokenizer": None,
        "tokenizer_mode": "auto",
        "skip_tokenizer_init": False,
        "trust_remote_code": False,
        "tensor_parallel_size": 1,
        "dtype": "auto",
        "revision": None,
        "tokenizer_revision": None,
        "model_kwargs": None,
        "pipeline_parallel_size": 1,
        "context_parallel_size": 1,
        "gpus_per_node": None,
        "moe_cluster_parallel_size": None,
        "moe_tensor_parallel_size": None,
        "moe_expert_parallel_size": None,
        "enable_attention_dp": False,
        "load_format": "auto",
        "enable_lora": False,
        "lora_config": None,
        "kv_cache_config": None,
        "enable_chunked_prefill": False,
        "guided_decoding_backend": None,
        "batched_logits_processor": None,
        "peft_cache_config": None,
        "scheduler_config": None,
        "cache_transceiver_config": None,
        "speculative_config": None,
        "max_batch_size": 2048,
        "max_input_len": 1024,
        "max_seq_len": None,
        "max_beam_width": 1,
        "max_num_tokens": 8192,
        "backend": "pytorch",
        "return_perf_metrics": False,
        "cuda_graph_config": None,
        "attention_dp_config": None,
        "disable_overlap_scheduler": False,
        "moe_config": None,
        "attn_backend": "TRTLLM",
        "sampler_type": "auto",
        "enable_iter_perf_stats": False,
        "enable_iter_req_stats": False,
        "print_iter_log": False,
        "enable_autotuner": True,
        "stream_interval": 1,
        "kv_connector_config": None,
        "mm_encoder_only": False,
        "orchestrator_type": None,
        **({"max_stats_len": 1000, "enable_sleep": False, "env_overrides": None} if IS_1_3 else {}),
    }

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if self.kv_cache_config is None:  # type: ignore[has-type]
            self.kv_cache_config = KvCacheConfig()
        if self.guided_decoding_backend not in (None, "xgrammar", "llguidance"):  # type: ignore[attr-defined]
            raise ValueError(f"guided_decoding_backend is {self.guided_decoding_backend!r}")  # type: ignore[attr-defined]
        if getattr(self.kv_cache_config, "kv_events_config", None) is not None:
            raise ValueError("kv_events_config has no implementation")
