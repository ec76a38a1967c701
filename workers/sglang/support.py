"""Declares what SGLang can do over all of its settings. Needs no SGLang."""

from __future__ import annotations

from headrace.workers.engine import Capabilities, DisaggStyle, Role
from headrace.workers.kit import ADAPTER_OPERATIONS, EngineSupport, words
from headrace.workers.sglang.convert import GUIDED
from headrace.workers.sglang.describe import OPERATIONS, PAUSE_OPERATIONS

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
