"""Load reports are made of polled statistics, and only of fresh ones."""

from __future__ import annotations

from headrace.workers.trtllm.load_meter import LoadMeter


def row(active: int, used: int, **fields: object) -> dict[str, object]:
    return {
        "numActiveRequests": active,
        "iterLatencyMS": 20.0,
        "kvCacheStats": {"maxNumBlocks": 100, "usedNumBlocks": used},
        "inflightBatchingStats": {"numCtxTokens": 64, "numGenRequests": active},
        **fields,
    }


def test_the_rows_of_all_ranks_are_added() -> None:
    meter = LoadMeter(2, clock=lambda: 0.0)
    meter.note([row(2, 10, attentionDpRank=0), row(3, 20, attentionDpRank=1)])
    load = meter.read(mine=7, blocks=200, slots=8)
    assert (load.running, load.waiting, load.blocks_used, load.blocks_total) == (5, 2, 30, 200)
    assert (load.step_s, load.step_prefill_tokens, load.step_decodes, meter.blocks) == (0.02, 128, 5, 200)


def test_each_rank_has_its_own_load_and_prompts_without_a_rank_are_shared_out() -> None:
    meter = LoadMeter(2, clock=lambda: 0.0)
    meter.note([row(2, 10, attentionDpRank=0, numQueuedRequests=4), row(3, 20, attentionDpRank=1)])
    meter.queued("a", 100, rank=1)
    meter.queued("b", 50)
    first, second = meter.read(mine=7, blocks=200, slots=8).ranks
    assert (first.running, first.waiting, first.blocks_used, first.blocks_total) == (2, 4, 10, 100)
    assert (second.running, second.blocks_used, second.step_decodes) == (3, 20, 3)
    assert (first.queued_prefill_tokens, second.queued_prefill_tokens) == (25, 125)
    meter.gone("a")
    assert meter.read(mine=7, blocks=200, slots=8).ranks[1].queued_prefill_tokens == 25
    assert [part.blocks_total for part in meter.read(mine=0, blocks=200, slots=8).ranks] == [100, 100]


def test_rows_without_a_rank_stand_for_all_ranks() -> None:
    meter = LoadMeter(2, clock=lambda: 0.0)
    meter.note([row(2, 10)])
    assert (meter.blocks, meter.read(mine=4, blocks=200, slots=8).running) == (200, 4)


def test_stale_rows_do_not_say_what_runs_and_an_idle_engine_has_nothing() -> None:
    now = [0.0]
    meter = LoadMeter(clock=lambda: now[0])
    meter.note([row(1, 5)])
    now[0] = 5.0
    assert meter.read(mine=4, blocks=100, slots=8).running == 4
    assert meter.read(mine=0, blocks=100, slots=8).blocks_used == 0


def test_rows_may_lack_their_parts() -> None:
    meter = LoadMeter(clock=lambda: 0.0)
    meter.note([{"kvCacheStats": None, "inflightBatchingStats": None}, {}])
    assert (meter.blocks, meter.read(mine=2, blocks=9, slots=1).waiting) == (0, 2)


def test_prompts_without_a_token_are_queued() -> None:
    meter = LoadMeter(clock=lambda: 0.0)
    meter.queued("a", 100)
    meter.queued("b", -5)
    assert meter.read(mine=2, blocks=9, slots=1).queued_prefill_tokens == 100
    meter.gone("a")
    meter.gone("a")
    assert meter.read(mine=2, blocks=9, slots=1).queued_prefill_tokens == 0
