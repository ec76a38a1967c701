"""Adds the engine's part to the load of each data-parallel rank in a load report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from headrace.broker.messages import RankLoad
from headrace.workers.engine import Load


def rank_loads(ranks: Sequence[RankLoad], load: Load, unsubmitted: Mapping[int, int]) -> list[RankLoad]:
    """Return the load of each rank. `unsubmitted`: tokens that the engine has not got yet, by rank.

    An engine that tells nothing of single ranks is taken to share its blocks and its work out evenly.
    """
    if not ranks:
        return []
    told = load.ranks if len(load.ranks) == len(ranks) else [_share(load, len(ranks))] * len(ranks)
    return [
        msgspec.structs.replace(
            rank,
            waiting=part.waiting,
            blocks_total=part.blocks_total,
            blocks_used=part.blocks_used,
            queued_prefill_tokens=part.queued_prefill_tokens + unsubmitted.get(number, 0),
            step_prefill_tokens=part.step_prefill_tokens,
            step_decodes=part.step_decodes,
        )
        for number, (rank, part) in enumerate(zip(ranks, told, strict=True))
    ]


def _share(load: Load, ranks: int) -> Load:
    """Return an even share of a load."""
    return Load(
        waiting=load.waiting // ranks,
        blocks_used=load.blocks_used // ranks,
        blocks_total=load.blocks_total // ranks,
        queued_prefill_tokens=load.queued_prefill_tokens // ranks,
        step_prefill_tokens=load.step_prefill_tokens // ranks,
        step_decodes=load.step_decodes // ranks,
    )
