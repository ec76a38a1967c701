"""Batch requests behind chats, in virtual time, with the router's scheduler and the workers' choice of preempted runs."""

from __future__ import annotations

import pytest

from benchmarks.backfill.load import answer, chats, engine, file_of, measure, settings, sorted_file
from benchmarks.backfill.world import MOST_PREEMPTIONS, World


def test_every_line_is_answered_once_and_none_is_preempted_too_often() -> None:
    world = World(chats(rate=12.0, seconds=6.0), file_of(120), [engine(16)] * 2, settings({}))
    world.run()
    assert all(one.ended_s >= 0 and answer(one) == one.request.output for one in world.served)
    preempted = [one.preempted for one in world.batch]
    assert 0 < max(preempted) <= MOST_PREEMPTIONS
    assert not any(one.preempted for one in world.interactive)


def test_batch_requests_use_most_of_the_idle_slots_and_cost_chats_little() -> None:
    offered, lines = chats(rate=10.0, seconds=15.0), file_of(400)
    without, beside = (measure("", offered, batch, workers=1, seconds=15.0, warm_s=2.0) for batch in ([], lines))
    assert beside.idle_slots_used > 0.9
    assert beside.ttft_p99 < 1.25 * without.ttft_p99


@pytest.mark.parametrize(("groups", "lines"), [(1, 160), (12, 20)])
def test_neighbours_in_a_file_that_is_sorted_by_prefix_find_that_in_a_cache(groups: int, lines: int) -> None:
    prefix = 1024
    file = sorted_file(groups, lines, prefix=prefix, tail=64, output=16)
    world = World([], file, [engine(64)] * 4, settings({}))
    world.run()
    hits = sum(len(one.request.tokens) - one.computed for one in world.batch)
    assert hits >= 0.95 * (len(file) - groups) * prefix
    assert len({one.worker for one in world.batch}) == 4, "no worker is left idle for the sake of a cache"
