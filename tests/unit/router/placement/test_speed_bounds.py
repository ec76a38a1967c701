"""What few samples say of a worker's speed moves it little from its neighbours, and what many say is believed."""

from __future__ import annotations

from math import inf, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.messages import LoadReport
from headrace.router.placement import calibration
from headrace.router.placement.calibration import LEAST_SHARE, Calibration, SpeedEstimate, StepTimes
from headrace.router.placement.settings import CalibrationSettings
from headrace.router.placement.speed_bounds import DOUBLING, OPEN_SAMPLES, bounded, reach, weighted_mean

CPU = (0.045, 0.0008, 0.002)  # seconds of a step, of a prefill token, of a decoding sequence

seconds = st.floats(1e-9, 1e3)
vectors = st.tuples(seconds, seconds, seconds)
counts = st.tuples(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 2000))
# Any step that computes prompt beside a sequence that decodes: all three coefficients take part.
steps = st.tuples(st.floats(1e-4, 10.0), st.integers(1, 8192), st.integers(1, 64))


def report(worker: str, n: int, step: tuple[float, int, int]) -> LoadReport:
    step_s, tokens, decodes = step
    return LoadReport(
        worker=worker,
        epoch=1,
        n=n,
        at=0.0,
        slots=8,
        running=1,
        waiting=0,
        step_s=step_s,
        step_prefill_tokens=tokens,
        step_decodes=decodes,
    )


def take(model: Calibration, worker: str, truth: tuple[float, float, float], count: int, *, start: int = 0) -> None:
    """Report so many steps of an engine of these coefficients."""
    for n in range(start, start + count):
        tokens, decodes = 1 + n * 997 % 4000, 1 + n * 7 % 16
        step_s = truth[0] + truth[1] * tokens + truth[2] * decodes
        model.observe(report(worker, n, (step_s, tokens, decodes)))


def coefficients(found: SpeedEstimate) -> tuple[float, float, float]:
    return found.base_s, 1 / found.prefill_tokens_per_s, found.per_decode_s


def test_the_reach_is_nothing_without_samples_and_doubles_at_every_dozen() -> None:
    assert reach(0) == 1.0
    assert reach(DOUBLING) == 2.0
    assert reach(3 * DOUBLING) == 8.0
    assert reach(OPEN_SAMPLES) >= 1000
    assert reach(10**9) < inf


@given(own=vectors, others=vectors, counts=counts)
def test_a_bounded_coefficient_is_within_reach_of_the_others_and_no_nearer_to_them_than_needed(own, others, counts) -> None:
    found = bounded(own, others, counts)
    for value, learnt, other, count in zip(found, own, others, counts, strict=True):
        if min(counts) >= OPEN_SAMPLES or other / reach(count) <= learnt <= other * reach(count):
            assert value == learnt
        else:
            assert value == pytest.approx(other * reach(count) if learnt > other else other / reach(count))
            assert min(learnt, other) <= value * (1 + 1e-9)
            assert value * (1 - 1e-9) <= max(learnt, other)


@given(st.lists(st.tuples(vectors, counts), min_size=1, max_size=8))
def test_a_mean_lies_among_what_it_is_of(known) -> None:
    found = weighted_mean(known, 100.0)
    for i, value in enumerate(found):
        each = [values[i] for values, _ in known]
        assert min(each) * (1 - 1e-9) <= value <= max(each) * (1 + 1e-9)


def test_a_worker_known_well_says_more_of_its_pool_than_a_new_one() -> None:
    found = weighted_mean([((1.0, 1.0, 1.0), (1000, 100, 0)), ((0.0, 0.0, 0.0), (5, 100, 0))], 100.0)
    assert found == pytest.approx((100 / 105, 0.5, 0.5))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(steps, steps), min_size=5, max_size=30))
def test_whatever_few_steps_say_two_workers_are_judged_alike_within_their_samples_reach(reported) -> None:
    model = Calibration(CalibrationSettings())
    for n, (one, other) in enumerate(reported):
        model.observe(report("a", n, one))
        model.observe(report("b", n, other))
    a, b = model.estimate("a"), model.estimate("b")
    for mine, its in zip(coefficients(a), coefficients(b), strict=True):
        assert abs(log2(mine / its)) <= (a.samples + b.samples) / DOUBLING + 1e-6


def noisy_steps(model: Calibration) -> None:
    """Report six steps of two CPU engines; those of `b` seemed to take almost no time, as when two were read at once."""
    for n in range(6):
        take(model, "a", CPU, 1, start=n)
        model.observe(report("b", n, (0.0019 + n * 1e-5, 340, 1)))


def test_a_few_steps_that_seemed_to_take_no_time_do_not_outweigh_a_cached_prefix() -> None:
    model = Calibration(CalibrationSettings())
    noisy_steps(model)
    holder_s = model.estimate("a").step_s(prefill_tokens=20, decodes=1)
    assert holder_s < model.estimate("b").step_s(prefill_tokens=340, decodes=1)


def test_without_the_bound_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "bounded", lambda own, others, counts: own)
    model = Calibration(CalibrationSettings())
    noisy_steps(model)
    holder_s = model.estimate("a").step_s(prefill_tokens=20, decodes=1)
    assert holder_s > 20 * model.estimate("b").step_s(prefill_tokens=340, decodes=1)


@settings(max_examples=25, deadline=None)
@given(factor=st.sampled_from([0.05, 0.2, 0.5, 2.0, 5.0, 20.0]), others=st.integers(1, 6))
def test_a_worker_that_is_really_faster_or_slower_is_judged_so_after_twelve_steps_for_each_doubling(factor, others) -> None:
    model = Calibration(CalibrationSettings())
    for i in range(others):
        take(model, f"known-{i}", CPU, 200)
    truth = (CPU[0] * factor, CPU[1] * factor, CPU[2] * factor)
    take(model, "new", truth, 53)  # 12 × log2(20) = 51.9
    for tokens, decodes in ((1, 1), (500, 8), (4000, 16)):
        found = model.estimate("new").step_s(prefill_tokens=tokens, decodes=decodes)
        assert found == pytest.approx(truth[0] + truth[1] * tokens + truth[2] * decodes, rel=0.05)


def test_until_then_it_is_judged_as_near_to_the_truth_as_its_steps_reach() -> None:
    model = Calibration(CalibrationSettings())
    take(model, "known", CPU, 1000)
    take(model, "new", (CPU[0] / 20, CPU[1] / 20, CPU[2] / 20), 24)
    for found, pool in zip(coefficients(model.estimate("new")), coefficients(model.pool()), strict=True):
        assert found == pytest.approx(pool / 4)


def test_a_coefficient_is_bounded_by_the_samples_it_took_part_in() -> None:
    model = Calibration(CalibrationSettings())
    take(model, "known", CPU, 1000)
    for n in range(200):  # of a prompt it has computed none
        model.observe(report("new", n, (CPU[0] / 20 * (1 + n % 3 / 100), 0, 4 + n % 8)))
    found = model.estimate("new")
    assert found.prefill_tokens_per_s == pytest.approx(model.pool().prefill_tokens_per_s)
    assert found.step_s(prefill_tokens=0, decodes=8) == pytest.approx(CPU[0] / 20, rel=0.1)


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, min_size=5, max_size=40))
def test_no_coefficient_vanishes_beside_the_others_in_a_few_steps(reported) -> None:
    prior = (0.008, 1 / 24_000, 0.00008)
    model = StepTimes(CalibrationSettings(), prior)
    for step_s, tokens, decodes in reported[:19]:  # too few to be taken for a change
        model.observe(step_s, prefill_tokens=tokens, decodes=decodes)
    shares = [found / first for found, first in zip(model.coefficients, prior, strict=True)]
    scale = model._prior[0] / prior[0]
    assert min(shares) >= scale * LEAST_SHARE / reach(model.samples) * (1 - 1e-9)


def test_what_a_worker_learns_moves_the_estimates_of_the_young_ones() -> None:
    model = Calibration(CalibrationSettings())
    for n in range(5):
        model.observe(report("new", n, (0.001 + n * 1e-6, 340, 1)))
    before = model.estimate("new").step_s(prefill_tokens=340, decodes=1)
    take(model, "known", CPU, 100)
    assert model.young == {"new", "known"}
    assert model.estimate("new").step_s(prefill_tokens=340, decodes=1) > 20 * before
    take(model, "known", CPU, OPEN_SAMPLES, start=100)
    assert model.young == {"new"}
    model.remove("new")
    assert model.young == set()
