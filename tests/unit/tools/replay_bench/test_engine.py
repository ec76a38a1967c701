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


def test_what_a_step_tells():
    engine = ModelledEngine(MODEL)
    ((end_s, step), (_, last)) = run(engine, [job(0, 700, 2, chain=[1, 2])])
    assert [j.index for j in step.prefilled] == [0]
    assert (sorted(step.stored), step.removed, step.settled) == ([1, 2], [], [])
    assert [j.index for j in last.settled] == [0]
    assert (last.stored, last.removed, last.changed) == ((), (), True)
    assert end_s == 0.5 + 700 / 1024 + 0.25


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
