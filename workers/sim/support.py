"""Declares what the simulator can do over all of its settings."""

from __future__ import annotations

from headrace.workers.engine import Capabilities, DisaggStyle
from headrace.workers.kit import EngineSupport, words
from headrace.workers.sim.control import HANDOVER_OPERATION, LEVELS, OPERATIONS, ROLES
from headrace.workers.sim.guided import KINDS
from headrace.workers.sim.run import MEDIA_KINDS

_GENERATING = Capabilities(
    roles=ROLES,
    disagg=DisaggStyle.PARAMS,
    resume_guided=True,
    resume_penalties=True,
    resume_repetition=True,
    kv_events=True,
    logprobs=True,
    prompt_logprobs=True,
    guided=frozenset(KINDS),
    lora="dynamic",
    media=frozenset(MEDIA_KINDS),
    prompt_embeds=True,
    cache_salt=True,
    priority=True,
    sleep_levels=LEVELS,
    operations=OPERATIONS,
)

_HANDING_OVER = "`disagg`, or role `prefill` or `decode`"

SUPPORT = EngineSupport(
    name="sim",
    title="simulator",
    words=words(_GENERATING, ("chat", "completion", "embedding", "score", "classify")) | {"handover rendezvous"},
    conditions={
        "role prefill": _HANDING_OVER,
        "role decode": _HANDING_OVER,
        "handover params": "`disagg=params`",
        "handover rendezvous": "`disagg=rendezvous`",
        f"operation {HANDOVER_OPERATION}": "`disagg`",
        "operation start_profile": "`profile_dir`",
        "operation stop_profile": "`profile_dir`",
        "kind embedding": "`pooling=embed`",
        "kind score": "`pooling=score`",
        "kind classify": "`pooling=classify`",
        "media image": "`media_tokens` over 0",
        "media video": "`media_tokens` over 0",
        "media audio": "`media_tokens` over 0",
    },
)
