import random

import pytest

from headrace.router.replay import PrefixCache
from headrace.tools.replay_bench.engine import EngineModel, ModelledEngine, ReplayJob
from headrace.tools.replay_bench.trace import TraceRequest

# Binary fractions, so that sums are exact: a step costs half a second, a block of prompt half, a decoding sequence a quarter.
MODEL = EngineModel(blocks=8, slots=2, step_tokens=1024, prefill_rate=1024.0, base_s=0.5, decode_s=0.25)


def job(index, tokens, output, *, at_s=0.0, chain=None):
    blocks = -(-tokens // 512)
    chain = tuple(chain) if chain is not None else tuple(range(1000 * (index + 1), 1000 * (index + 1) + blocks))
    return ReplayJob(index=index, request=TraceRequest(at_s=at_s, tokens=tokens, output=output, chain=chain))


def run(engine, jobs):
    """Every job at its time; returns the steps as (end, step)."""
    jobs, steps = list(jobs), []
    while jobs or engine.step_ends_s is not None:
        if jobs and (engine.step_ends_s is None or jobs[0].request.at_s <= engine.step_ends_s):
            engine.submit(jobs[0], jobs.pop(0).request.at_s)
        else:
            idle, now_s = not engine.running, engine.step_ends_s
            step = engine.end_step(now_s)
            if not idle:  # else it has only begun
                steps.append((now_s, step))
    return steps


def begin(engine, *jobs):
    """All at once on an idle engine."""
    for one in jobs:
        engine.submit(one, 0.0)
    engine.end_step(0.0)


def test_the_first_token_comes_in_the_step_that_completes_the_prompt():
    one = job(0, 512, 3)
    run(ModelledEngine(MODEL), [one])
    assert one.first_s == 0.5 + 0.5 + 0.25
    assert one.end_s == one.first_s + 2 * (0.5 + 0.25)
    assert (one.arrived_s, one.admitted_s, one.cached_blocks, one.uncached) == (0.0, 0.0, 0, 512)


def test_a_long_prompt_is_computed_in_parts():
    one = job(0, 1536, 1)
    run(ModelledEngine(MODEL), [one])
    assert one.first_s == (0.5 + 1.0) + (0.5 + 0.5 + 0.25)  # nothing decodes in the first step
    assert one.end_s == one.first_s


def test_prompts_are_taken_in_the_order_of_arrival_within_the_budget():
    first, second = job(0, 1024, 2), job(1, 512, 1)
    run(ModelledEngine(MODEL), [first, second])
    assert first.first_s == 0.5 + 1.0 + 0.25  # the budget is used up
    assert second.first_s == first.first_s + 0.5 + 0.5 + 2 * 0.25
    assert second.admitted_s == first.first_s
    assert first.end_s == second.first_s


def test_two_prompts_share_a_step():
    first, second = job(0, 512, 1), job(1, 512, 1)
    engine = ModelledEngine(MODEL)
    begin(engine, first, second)
    assert engine.step_ends_s == 0.5 + 1.0 + 2 * 0.25
    assert (engine.step_prefill_tokens, engine.step_decodes) == (1024, 2)


def test_without_a_slot_a_request_waits():
    jobs = [job(n, 256, 4) for n in range(3)]
    engine = ModelledEngine(MODEL)
    steps = run(engine, jobs)
    first_end_s = 0.5 + 0.5 + 0.5 + 3 * (0.5 + 0.5)
    assert [j.end_s for j in jobs[:2]] == [first_end_s, first_end_s]
    assert jobs[2].admitted_s == first_end_s
    assert len(steps) == 4  # those of the first two that are alike in one go, and so the last one's
    assert (engine.running, engine.waiting, engine.blocks_used, engine.queued_prefill_tokens) == (0, 0, 0, 0)


def test_cached_blocks_are_not_computed_again_but_for_the_last_token():
    one, same, longer = job(0, 1024, 1, chain=[1, 2]), job(1, 1024, 1, chain=[1, 2]), job(2, 1500, 1, chain=[1, 2, 3])
    run(ModelledEngine(MODEL), [one, same, longer])
    assert (one.uncached, same.uncached, longer.uncached) == (1024, 1, 1500 - 1024)
    assert (same.cached_blocks, longer.cached_blocks) == (2, 2)


def test_siblings_in_one_step_share_what_is_computed_there():
    one, same = job(0, 512, 1, chain=[1]), job(1, 512, 1, chain=[1])
    begin(ModelledEngine(MODEL), one, same)
    assert (one.uncached, same.uncached) == (512, 1)


def test_an_arrival_while_all_only_decode_is_admitted_at_the_next_step():
    long, late = job(0, 512, 101), job(1, 512, 1, at_s=1.25 + 0.75 * 10 + 0.5)
    engine = ModelledEngine(MODEL)
    run(engine, [long, late])
    assert late.admitted_s == 1.25 + 0.75 * 11
    assert long.end_s == 1.25 + 0.75 * 11 + (0.5 + 0.5 + 2 * 0.25) + 0.75 * 88  # 1 + 11 + 1 + 88 tokens


def test_an_arrival_exactly_between_two_steps_is_admitted_there():
    long, late = job(0, 512, 101), job(1, 512, 1, at_s=1.25 + 0.75 * 10)
    run(ModelledEngine(MODEL), [long, late])
    assert late.admitted_s == late.request.at_s


def test_what_a_step_tells():
    engine = ModelledEngine(MODEL)
    ((end_s, step), (_, last)) = run(engine, [job(0, 700, 2, chain=[1, 2])])
    assert [j.index for j in step.prefilled] == [0]
    assert (sorted(step.stored), step.removed, step.settled) == ([1, 2], [], [])
    assert [j.index for j in last.settled] == [0]
    assert (last.stored, last.removed, last.changed) == ((), (), True)
    assert end_s == 0.5 + 700 / 1024 + 0.25


def test_load_while_it_runs():
    engine = ModelledEngine(MODEL)
    begin(engine, *(job(n, tokens, 5) for n, tokens in enumerate((1024, 1536, 512))))
    assert (engine.running, engine.waiting, engine.queued_prefill_tokens, engine.blocks_used) == (1, 2, 2048, 2)
    engine.end_step(engine.step_ends_s)
    assert (engine.running, engine.waiting, engine.queued_prefill_tokens, engine.blocks_used) == (2, 1, 1024, 5)


def test_the_cache_drops_the_tail_of_the_least_recent_prompt_first():
    cache = PrefixCache(4)
    cache.touch([1, 2, 3])
    cache.touch([7, 8])
    assert (cache.match([1, 2, 3]), cache.match([7, 8])) == (2, 2)
    assert [sorted(part) for part in cache.changes()] == [[1, 2, 7, 8], []]  # 3 came and went between the two looks
    cache.touch([1])
    cache.touch([9, 10])
    assert (2 in cache, 1 in cache, 8 in cache, 7 in cache) == (False, True, False, True)
    assert [sorted(part) for part in cache.changes()] == [[9, 10], [2, 8]]


def test_a_prompt_larger_than_the_cache_leaves_its_beginning():
    cache = PrefixCache(2)
    cache.touch([1, 2, 3, 4])
    assert len(cache) == 2
    assert cache.match([1, 2, 3, 4]) == 2


def test_a_block_that_goes_and_comes_back_within_a_step_has_not_changed():
    cache = PrefixCache(1)
    cache.touch([1])
    cache.changes()
    cache.touch([2])
    cache.touch([1])
    assert cache.changes() == ((), ())


class StepByStep:
    """The model of design §10 without any shortcut: every step is one iteration."""

    def __init__(self, model):
        self.model, self.cache = model, PrefixCache(model.blocks)

    def run(self, jobs):
        waiting, running, now_s = list(jobs), [], 0.0
        left, given = {}, {}
        while waiting or running:
            if not running and waiting[0].request.at_s > now_s:
                now_s = waiting[0].request.at_s
            budget = self.model.step_tokens
            for one in running:
                part = min(budget, left[one.index])
                left[one.index] -= part
                budget -= part
            while waiting and waiting[0].request.at_s <= now_s and budget > 0 and len(running) < self.model.slots:
                one = waiting.pop(0)
                one.admitted_s, one.cached_blocks = now_s, self.cache.match(one.request.chain)
                self.cache.touch(one.request.chain)
                uncached = max(one.request.tokens - one.cached_blocks * 512, 1)
                part = min(budget, uncached)
                left[one.index], given[one.index] = uncached - part, 0
                budget -= part
                running.append(one)
            decoding = [one for one in running if not left[one.index]]
            now_s += self.model.base_s + (self.model.step_tokens - budget) / self.model.prefill_rate
            now_s += self.model.decode_s * len(decoding)
            for one in decoding:
                given[one.index] += 1
                if given[one.index] == 1:
                    one.first_s = now_s
                if given[one.index] == one.request.output:
                    one.end_s = now_s
                    running.remove(one)


@pytest.mark.parametrize("seed", range(20))
def test_equals_the_model_without_shortcuts(seed):
    rng = random.Random(seed)
    model = EngineModel(blocks=rng.choice([5, 20, 200]), slots=rng.choice([1, 3, 16]), step_tokens=rng.choice([700, 4096]))

    def jobs():
        draw, at_s = random.Random(seed), 0.0
        for index in range(60):
            at_s += draw.expovariate(draw.choice([2.0, 20.0]))
            blocks = draw.randint(1, 12)
            start = draw.choice([0, 0, 100 * index])
            tokens = blocks * 512 - draw.randint(0, 511)
            yield job(index, tokens, draw.randint(1, 80), at_s=at_s, chain=range(start, start + blocks))

    ours, plain = list(jobs()), list(jobs())
    run(ModelledEngine(model), ours)
    StepByStep(model).run(plain)
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine.cached_blocks == theirs.cached_blocks
        for name in ("admitted_s", "first_s", "end_s"):
            assert getattr(mine, name) == pytest.approx(getattr(theirs, name), abs=1e-9), (mine.index, name)
