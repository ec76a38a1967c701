"""The names of the LLM API that applications import."""

from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor import CompletionOutput, LoRARequest, RequestError
from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams

from .llm import LLM, RequestOutput
from .llm_args import CacheTransceiverConfig, KvCacheConfig, TorchLlmArgs

__all__ = [
    "LLM",
    "CacheTransceiverConfig",
    "CompletionOutput",
    "DisaggregatedParams",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "LoRARequest",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TorchLlmArgs",
]
