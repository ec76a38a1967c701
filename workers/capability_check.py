"""Refuses sequences that need an ability which their engine does not declare."""

from __future__ import annotations

from headrace.workers.engine import Capabilities, Sequence
from headrace.workers.errors import UnsupportedByEngine

_GUIDED_OPTIONS = frozenset({"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"})


def refuse_undeclared(capabilities: Capabilities, sequence: Sequence) -> None:
    """Raise UnsupportedByEngine naming the first ability that the sequence needs and the engine does not declare.

    A priority is never refused: an engine without priorities serves in the order of arrival.
    """
    kinds = [name for name in sequence.guided or () if name not in _GUIDED_OPTIONS]
    media = [str(item.get("kind")) for item in sequence.media]
    sampling = sequence.sampling
    needs: tuple[tuple[str, bool], ...] = (
        ("seed", sampling.seed is None or not sampling.temperature or capabilities.seeds),
        ("logprobs", sequence.logprobs is None or capabilities.logprobs),
        ("prompt_logprobs", sequence.prompt_logprobs is None or capabilities.prompt_logprobs),
        ("prompt_embeds", sequence.prompt_embeds is None or capabilities.prompt_embeds),
        ("cache_salt", sequence.cache_salt is None or capabilities.cache_salt),
        ("adapter", sequence.adapter is None or capabilities.lora != "none"),
        *((kind, kind in capabilities.guided) for kind in kinds),
        *((kind, kind in capabilities.media) for kind in media),
    )
    for name, able in needs:
        if not able:
            raise UnsupportedByEngine(f"this worker's engine does not support {name!r}", param=name)
    if sequence.handover is not None and capabilities.disagg.value == "none":
        raise UnsupportedByEngine(f"this worker's engine hands nothing over: it cannot be the {sequence.handover.kind} side")
