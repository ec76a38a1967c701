"""Declares what TensorRT-LLM can do over all of its settings, by its documentation. Needs no TensorRT-LLM."""

from __future__ import annotations

from headrace.workers.engine import Capabilities, DisaggStyle, Role
from headrace.workers.kit import ADAPTER_OPERATIONS, EngineSupport, words
from headrace.workers.trtllm.convert import GUIDED

_MOST = Capabilities(
    resume_repetition=True,
    roles=frozenset({Role.AGGREGATED, Role.PREFILL, Role.DECODE}),
    disagg=DisaggStyle.PARAMS,
    kv_events=True,
    logprobs=True,
    guided=GUIDED,
    lora="dynamic",
    cache_salt=True,
    priority=True,
    operations=ADAPTER_OPERATIONS,
)

_TRANSCEIVER = "`cache_transceiver_config`, or role `prefill` or `decode`"
_ADAPTERS = "`adapters` or `lora_config`"

SUPPORT = EngineSupport(
    name="trtllm",
    title="TensorRT-LLM 1.2 and 1.3 (stand-in)",
    words=words(_MOST, ("chat", "completion")),
    conditions={
        "role prefill": "role `prefill`, or `cache_transceiver_config` and `disable_overlap_scheduler=true`",
        "role decode": _TRANSCEIVER,
        "handover params": _TRANSCEIVER,
        "kv_events": "block reuse on; in 1.2 without the salts of blocks",
        "lora dynamic": _ADAPTERS,
        "operation load_adapter": _ADAPTERS,
        "operation unload_adapter": _ADAPTERS,
        "priority": "TensorRT-LLM 1.3",
    },
)
