"""Declares what vLLM can do over all of its settings. Needs no vLLM."""

from __future__ import annotations

from headrace.workers.engine import Capabilities, DisaggStyle, Role
from headrace.workers.kit import ADAPTER_OPERATIONS, EngineSupport, words
from headrace.workers.vllm.convert import GUIDED, OPERATIONS

_MOST = Capabilities(
    roles=frozenset({Role.AGGREGATED, Role.PREFILL, Role.DECODE, Role.ENCODE}),
    disagg=DisaggStyle.PARAMS,
    kv_events=True,
    logprobs=True,
    prompt_logprobs=True,
    resume_repetition=True,
    guided=GUIDED,
    lora="dynamic",
    media=frozenset({"image", "video", "audio"}),
    prompt_embeds=True,
    cache_salt=True,
    priority=True,
    sleep_levels=(1, 2),
    operations=OPERATIONS | ADAPTER_OPERATIONS,
)

_CONNECTOR = "role `prefill` or `decode`, or `kv_transfer_mode`"
_ADAPTERS = "`adapters` or `enable_lora=true`"
_PROFILER = "`profiler_config`"
_SLEEP_MODE = "on a GPU `enable_sleep_mode=true`, without KV transfer and tiers"
_POOLING_MODEL = "a pooling model"
_MEDIA_MODEL = "a model for it"
_BY_SERVED_MODELS = "tests/engines/test_embeddings.py puts it beside vLLM's own server"
_BY_PAIRS = "tests/engines/test_vllm_disagg.py drives it with two engines"
_BY_MEDIA = "tests/engines/test_vllm_media.py, test_vllm_video.py and test_vllm_sound.py put it beside vLLM asked directly"

SUPPORT = EngineSupport(
    name="vllm",
    title="vLLM 0.32",
    words=words(_MOST, ("chat", "completion", "embedding", "score", "classify")),
    conditions={
        "role prefill": _CONNECTOR,
        "role decode": _CONNECTOR,
        "role encode": "a model that takes media",
        "handover params": _CONNECTOR,
        "kv_events": "prefix caching on, all ranks in this engine",
        "lora dynamic": _ADAPTERS,
        "operation load_adapter": _ADAPTERS,
        "operation unload_adapter": _ADAPTERS,
        "operation start_profile": _PROFILER,
        "operation stop_profile": _PROFILER,
        "operation sleep": _SLEEP_MODE,
        "operation wake": _SLEEP_MODE,
        "sleep level 1": _SLEEP_MODE,
        "sleep level 2": _SLEEP_MODE,
        "prompt_embeds": "`enable_prompt_embeds=true`",
        "priority": "`scheduling_policy=priority`",
        "media image": _MEDIA_MODEL,
        "media video": _MEDIA_MODEL,
        "media audio": _MEDIA_MODEL,
        "kind embedding": _POOLING_MODEL,
        "kind score": _POOLING_MODEL,
        "kind classify": _POOLING_MODEL,
    },
    untried={
        "role prefill": _BY_PAIRS,
        "role decode": _BY_PAIRS,
        "role encode": "tests/engines/test_vllm_encode.py runs one beside a worker that serves",
        "handover params": _BY_PAIRS,
        "media image": _BY_MEDIA,
        "media video": _BY_MEDIA,
        "media audio": _BY_MEDIA,
        "kind embedding": _BY_SERVED_MODELS,
        "kind score": _BY_SERVED_MODELS,
        "kind classify": _BY_SERVED_MODELS,
    },
)
