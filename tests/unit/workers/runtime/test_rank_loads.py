"""The load of a rank is what the worker knows of its runs and what the engine tells of it."""

from __future__ import annotations

from headrace.broker.messages import RankLoad
from headrace.workers.engine import Load
from headrace.workers.runtime.rank_loads import rank_loads

RANKS = [RankLoad(running=2, batch=1), RankLoad(running=1)]


def test_what_the_engine_tells_of_a_rank_is_added_to_what_runs_there() -> None:
    told = (Load(running=9, blocks_used=5, blocks_total=50, queued_prefill_tokens=10), Load(waiting=3, step_decodes=4))
    first, second = rank_loads(RANKS, Load(ranks=told), {1: 7})
    assert (first.running, first.batch, first.blocks_used, first.blocks_total) == (2, 1, 5, 50)
    assert (first.queued_prefill_tokens, second.queued_prefill_tokens) == (10, 7)
    assert (second.running, second.waiting, second.step_decodes) == (1, 3, 4)


def test_an_engine_that_tells_nothing_of_ranks_shares_out_evenly() -> None:
    loads = rank_loads(RANKS, Load(blocks_total=100, blocks_used=40, queued_prefill_tokens=600), {0: 8})
    assert [(load.blocks_total, load.blocks_used, load.queued_prefill_tokens) for load in loads] == [
        (50, 20, 308),
        (50, 20, 300),
    ]


def test_a_worker_with_one_rank_reports_none() -> None:
    assert rank_loads([], Load(blocks_total=100), {}) == []
