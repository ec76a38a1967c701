"""Describes what an engine can declare in any of its configurations, in words that need no engine to be installed.

A started engine declares what it can do as it was started (`Engine.capabilities`). `EngineSupport` is the union over all
configurations: the support table of the documentation is made from it, and the engine contract tests
(tests/engine_contract) compare both with what the engine does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from headrace.workers.engine import Capabilities, DisaggStyle

_FLAGS = (
    "seeds",
    "resume",
    "resume_guided",
    "resume_penalties",
    "resume_repetition",
    "kv_events",
    "logprobs",
    "prompt_logprobs",
    "prompt_embeds",
    "cache_salt",
    "priority",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSupport:
    """The abilities of an engine over all of its configurations, as words (`words`)."""

    name: str  # as in `--engine`
    title: str  # with the version that the adapter is written for
    words: frozenset[str]
    conditions: Mapping[str, str] = field(default_factory=dict)  # word → the settings that it takes
    untried: Mapping[str, str] = field(default_factory=dict)  # word → why no contract test drives it

    def __post_init__(self) -> None:
        for given in (self.conditions, self.untried):
            if unknown := given.keys() - self.words:
                raise ValueError(f"engine {self.name!r}: {sorted(unknown)} are not among its words")


def words(capabilities: Capabilities, kinds: Iterable[str] = ()) -> frozenset[str]:
    """Return a word per ability: "logprobs", "guided json", "role prefill", "handover params", "kind embedding" …"""
    found = {name for name in _FLAGS if getattr(capabilities, name)}
    found |= {f"guided {kind}" for kind in capabilities.guided}
    found |= {f"media {kind}" for kind in capabilities.media}
    found |= {f"role {role.value}" for role in capabilities.roles}
    found |= {f"operation {name}" for name in capabilities.operations}
    found |= {f"sleep level {level}" for level in capabilities.sleep_levels}
    found |= {f"kind {kind}" for kind in kinds}
    if capabilities.disagg is not DisaggStyle.NONE:
        found.add(f"handover {capabilities.disagg.value}")
    if capabilities.lora != "none":
        found.add(f"lora {capabilities.lora}")
    return frozenset(found)
