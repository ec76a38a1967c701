"""Step times are learnt from reports: near the truth with noise and outliers, after a change, and never nonsense."""

from __future__ import annotations

import random
from math import inf, isfinite, log2, nan

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.broker.messages.events import LoadReport
from headrace.router.errors import SettingsInvalid
from headrace.router.placement import calibration
from headrace.router.placement.calibration import (
    DOUBLING,
    LEAST_SHARE,
    OPEN_SAMPLES,
    Calibration,
    SpeedEstimate,
    StepTimes,
    bounded,
    reach,
    weighted_mean,
)
from headrace.router.placement.settings import CalibrationSettings

TRUTH = (0.008, 1 / 24_000, 0.00008)
PREDICTED = ((0, 1), (0, 64), (512, 32), (8192, 0), (8192, 64))  # prefill tokens and decodes of steps that are predicted


def prior() -> tuple[float, float, float]:
    defaults = CalibrationSettings()
    return defaults.base_s, 1 / defaults.prefill_tokens_per_s, defaults.per_decode_s


def drive(
    model: StepTimes, truth, *, steps: int, seed: int = 0, noise: float = 0.05, outliers: float = 0.0, prefill=True
) -> list[tuple[int, int]]:
    """An engine of these coefficients: mixed steps, relative noise, now and then a pause or an impossibly short time.

    Returns the prefill tokens and decodes of the steps.
    """
    rng = random.Random(seed)
    made = []
    for _ in range(steps):
        tokens = rng.choice([0, 0, rng.randint(1, 8192), 8192]) if prefill else 0
        decodes = rng.randint(0 if tokens else 1, 64)
        step_s = (truth[0] + truth[1] * tokens + truth[2] * decodes) * max(0.1, rng.gauss(1.0, noise))
        if rng.random() < outliers:
            step_s *= rng.choice([0.02, 30.0, 100.0])
        assert model.observe(step_s, prefill_tokens=tokens, decodes=decodes) in ("", "too_large")
        made.append((tokens, decodes))
    return made


def error(model: StepTimes, truth) -> float:
    """The largest relative error of a coefficient."""
    return max(abs(found / true - 1) for found, true in zip(model.coefficients, truth, strict=True))


def step_errors(model: StepTimes, truth) -> list[float]:
    """The relative errors of predicted step times, which are what counts; a tiny coefficient may be off."""
    found = model.coefficients
    errors = []
    for tokens, decodes in PREDICTED:
        true = truth[0] + truth[1] * tokens + truth[2] * decodes
        errors.append(abs((found[0] + found[1] * tokens + found[2] * decodes) / true - 1))
    return errors


def step_error(model: StepTimes, truth) -> float:
    return max(step_errors(model, truth))


def least_deviations(truth, steps, *, noise: float = 0.05) -> list[float]:
    """The relative standard deviation that the least squares of all these steps have, at each of the predicted ones.

    Where an engine's base is tiny, a step of one sequence says next to nothing beside those of dozens, and no method can tell
    its time from steps that are noisy.
    """

    def parts(some) -> np.ndarray:
        each = np.array([(1, tokens, decodes) for tokens, decodes in some], dtype=float) * np.array(truth)
        return each / each.sum(axis=1)[:, None]

    known, weights = parts(steps), CalibrationSettings().forgetting ** np.arange(len(steps) - 1, -1, -1)
    inverse = np.linalg.inv((known * weights[:, None]).T @ known)
    spread = noise**2 * inverse @ ((known * weights[:, None] ** 2).T @ known) @ inverse
    return [float(np.sqrt(one @ spread @ one)) for one in parts(PREDICTED)]


engines = st.tuples(st.floats(1e-4, 0.5), st.floats(1e-6, 5e-3), st.floats(1e-5, 2e-3))


@settings(max_examples=40, deadline=None)
@given(truth=engines, seed=st.integers(0, 10_000))
@example(truth=(1e-4, 2.5818363612605275e-06, 2e-3), seed=720)  # a step of one sequence is told 21 % too long: 3 deviations
def test_it_finds_the_coefficients_of_any_engine(truth, seed) -> None:
    """Within a tenth, or five standard deviations where the steps themselves say no more."""
    model = StepTimes(CalibrationSettings(), prior())
    steps = drive(model, truth, steps=400, seed=seed)
    for error, deviation in zip(step_errors(model, truth), least_deviations(truth, steps), strict=True):
        assert error < max(0.10, 5 * deviation)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_where_all_three_matter_each_is_found(seed) -> None:
    truth = (0.02, 1 / 860, 0.0007)  # a CPU engine, 30 times slower than the prior
    model = StepTimes(CalibrationSettings(), prior())
    drive(model, truth, steps=400, seed=seed)
    assert error(model, truth) < 0.15


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), outliers=st.floats(0.0, 0.05))
@example(seed=335, outliers=0.03125)  # two of the first steps, and a fresh start at a coefficient of almost zero
def test_outliers_do_not_carry_it_away(seed, outliers) -> None:
    model = StepTimes(CalibrationSettings(), prior())
    drive(model, TRUTH, steps=400, seed=seed, outliers=outliers)
    assert step_error(model, TRUTH) < 0.10


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), factor=st.sampled_from([0.2, 0.5, 2.0, 5.0]), only=st.sampled_from([None, 1]))
def test_it_follows_a_change(seed, factor, only) -> None:
    model = StepTimes(CalibrationSettings(), prior())
    drive(model, TRUTH, steps=400, seed=seed)
    changed = tuple(value * factor if only is None or only == place else value for place, value in enumerate(TRUTH))
    drive(model, changed, steps=100, seed=seed + 1)
    assert step_error(model, changed) < 0.15


def test_a_change_is_followed_faster_than_the_memory_is_long() -> None:
    model = StepTimes(CalibrationSettings(forgetting=0.999), prior())
    drive(model, TRUTH, steps=3000)
    slower = (TRUTH[0] * 3, TRUTH[1] * 3, TRUTH[2] * 3)
    drive(model, slower, steps=60)
    assert step_error(model, slower) < 0.15


def test_what_the_samples_say_nothing_about_stays() -> None:
    model = StepTimes(CalibrationSettings(), prior())
    truth = (0.02, 1 / 860, 0.0007)
    drive(model, truth, steps=400)
    rate = model.coefficients[1]
    drive(model, truth, steps=5000, prefill=False)
    assert model.coefficients[1] == pytest.approx(rate, rel=0.02)


def test_evidence_that_fades_away_altogether_leaves_the_estimate_where_it_was() -> None:
    model = StepTimes(CalibrationSettings(forgetting=0.5), prior())
    drive(model, TRUTH, steps=400, noise=0.01)
    rate = model.coefficients[1]
    drive(model, TRUTH, steps=3000, noise=0.01, prefill=False)
    assert model.coefficients[1] == pytest.approx(rate, rel=0.02)


@pytest.mark.parametrize("factor", [0.01, 300.0])
def test_a_prior_of_quite_another_machine_is_overcome_at_once(factor: float) -> None:
    truth = (0.01 * factor, 1e-6 * factor, 1e-4 * factor)
    model = StepTimes(CalibrationSettings(), (0.01, 1e-6, 1e-4))
    drive(model, truth, steps=6)
    assert step_error(model, truth) < 0.15


def test_the_prior_holds_until_there_are_enough_samples() -> None:
    model = StepTimes(CalibrationSettings(min_samples=5), prior())
    drive(model, (1.0, 0.001, 0.01), steps=4)
    assert model.coefficients == prior()
    drive(model, (1.0, 0.001, 0.01), steps=1, seed=1)
    assert model.coefficients != prior()


def test_one_step_reported_again_and_again_counts_once() -> None:
    model = StepTimes(CalibrationSettings(), prior())
    drive(model, TRUTH, steps=100)
    before = model.coefficients
    assert model.observe(0.5, prefill_tokens=10, decodes=1) == ""
    after = model.coefficients
    for _ in range(1000):
        assert model.observe(0.5, prefill_tokens=10, decodes=1) == "repeated"
    assert model.coefficients == after != before
    assert model.samples == 101


@pytest.mark.parametrize(
    ("step", "why"),
    [
        ((nan, 1, 1), "not_finite"),
        ((inf, 1, 1), "not_finite"),
        ((0.1, nan, 1), "not_finite"),
        ((0.1, 1, -inf), "not_finite"),
        ((-0.1, 1, 1), "negative"),
        ((0.1, -1, 1), "negative"),
        ((0.1, 1, -1), "negative"),
        ((61.0, 1, 1), "too_large"),
        ((0.1, 10**18, 1), "too_large"),
        ((0.1, 1, 2**63), "too_large"),
        ((0.0, 1, 1), "no_step"),
        ((0.1, 0, 0), "no_step"),
    ],
)
def test_an_impossible_step_teaches_nothing_and_is_counted(step, why) -> None:
    calibration = Calibration(CalibrationSettings(min_samples=1))
    for n in range(3):
        calibration.observe(report("w", n=n, step=step))
    assert calibration.unused == {why: 3}
    assert calibration.estimate("w") == calibration.pool()
    assert calibration.estimate("w").samples == 0


anything = st.one_of(st.floats(), st.floats(1e-6, 60.0), st.sampled_from([5e-324, 1e-12, 60.0, -1.0]))
counts = st.one_of(st.integers(-10, 10**20), st.integers(0, 8192), st.floats())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(anything, counts, counts), max_size=150))
def test_estimates_are_positive_and_finite_whatever_is_reported(steps) -> None:
    calibration = Calibration(CalibrationSettings(min_samples=1))
    for n, step in enumerate(steps):
        calibration.observe(report("w", n=n, step=step))
        for found in (calibration.estimate("w"), calibration.pool()):
            for value in (
                found.base_s,
                found.prefill_tokens_per_s,
                found.per_decode_s,
                found.step_s(prefill_tokens=1, decodes=1),
            ):
                assert isfinite(value)
                assert value > 0


# -- a pool ------------------------------------------------------------------------------------------------------------------


def report(worker: str, *, n: int, step, epoch: int = 1) -> LoadReport:
    step_s, tokens, decodes = step
    return LoadReport(
        worker=worker,
        epoch=epoch,
        n=n,
        at=0.0,
        slots=8,
        running=1,
        waiting=0,
        step_s=step_s,
        step_prefill_tokens=tokens,
        step_decodes=decodes,
    )


def run(calibration: Calibration, worker: str, truth, *, steps: int, epoch: int = 1) -> None:
    rng = random.Random(3)
    for n in range(steps):
        tokens, decodes = rng.choice([0, rng.randint(1, 8192)]), rng.randint(1, 64)
        step_s = (truth[0] + truth[1] * tokens + truth[2] * decodes) * rng.gauss(1.0, 0.02)
        calibration.observe(report(worker, n=n, step=(step_s, tokens, decodes), epoch=epoch))


def test_a_new_worker_is_assumed_to_be_like_the_others() -> None:
    calibration = Calibration(CalibrationSettings())
    assert calibration.estimate("nobody") == SpeedEstimate(0.008, 24_000.0, 0.00008)
    run(calibration, "a", (0.02, 1 / 1000, 0.001), steps=300)
    run(calibration, "b", (0.04, 1 / 500, 0.003), steps=300)
    assert calibration.estimate("new").base_s == pytest.approx(0.03, rel=0.1)
    assert 1 / calibration.estimate("new").prefill_tokens_per_s == pytest.approx(0.0015, rel=0.1)
    run(calibration, "new", (0.02, 1 / 1000, 0.001), steps=1)
    assert calibration.estimate("new").base_s == pytest.approx(0.03, rel=0.1)
    assert calibration.estimate("a").step_s(prefill_tokens=1000, decodes=10) == pytest.approx(1.03, rel=0.05)
    assert calibration.estimate("a").samples == 300


def test_a_worker_of_few_reports_is_assumed_to_be_like_one_that_became_known_after_its_first() -> None:
    truth = (0.001, 1 / 50_000, 0.00001)
    calibration = Calibration(CalibrationSettings())
    run(calibration, "quiet", truth, steps=2)
    assert calibration.estimate("quiet") == SpeedEstimate(0.008, 24_000.0, 0.00008, samples=2)
    run(calibration, "busy", truth, steps=300)
    assert calibration.estimate("quiet").step_s(prefill_tokens=1000, decodes=1) == pytest.approx(0.021, rel=0.1)
    assert calibration.estimate("quiet").samples == 2


def test_a_restarted_engine_is_assumed_to_be_as_it_was_and_learnt_anew() -> None:
    calibration = Calibration(CalibrationSettings())
    run(calibration, "a", (0.02, 1 / 1000, 0.001), steps=300)
    run(calibration, "a", (0.002, 1 / 10_000, 0.0001), steps=1, epoch=2)
    assert calibration.estimate("a").base_s == pytest.approx(0.02, rel=0.1)
    run(calibration, "a", (0.002, 1 / 10_000, 0.0001), steps=40, epoch=2)
    assert calibration.estimate("a").step_s(prefill_tokens=1000, decodes=10) == pytest.approx(0.103, rel=0.1)


def test_a_restart_forgets_what_the_engine_was_before() -> None:
    calibration = Calibration(CalibrationSettings(forgetting=0.999))
    run(calibration, "a", (0.02, 1 / 1000, 0.001), steps=1000)
    run(calibration, "a", (0.023, 1 / 870, 0.00115), steps=50, epoch=2)  # no change that would be noticed by itself
    assert calibration.estimate("a").step_s(prefill_tokens=1000, decodes=10) == pytest.approx(1.184, rel=0.04)


def test_a_worker_that_left_is_forgotten() -> None:
    calibration = Calibration(CalibrationSettings())
    run(calibration, "a", (0.02, 1 / 1000, 0.001), steps=300)
    calibration.remove("a")
    calibration.remove("never seen")
    assert calibration.estimate("a") == SpeedEstimate(0.008, 24_000.0, 0.00008)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("base_s", 0.0),
        ("base_s", nan),
        ("per_decode_s", -1.0),
        ("prefill_tokens_per_s", 0.0),
        ("prefill_tokens_per_s", inf),
        ("forgetting", 1.0),
        ("prior_samples", 0.0),
        ("min_samples", 0),
        ("most_step_s", inf),
    ],
)
def test_settings_that_cannot_be_are_named(name: str, value: float) -> None:
    with pytest.raises(SettingsInvalid, match=f"^{name} must be .*, got {value}$"):
        CalibrationSettings(**{name: value})


CPU = (0.045, 0.0008, 0.002)  # seconds of a step, of a prefill token, of a decoding sequence

seconds = st.floats(1e-9, 1e3)
vectors = st.tuples(seconds, seconds, seconds)
speed_bounds_counts = st.tuples(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 2000))
# Any step that computes prompt beside a sequence that decodes: all three coefficients take part.
steps = st.tuples(st.floats(1e-4, 10.0), st.integers(1, 8192), st.integers(1, 64))


def speed_bounds_report(worker: str, n: int, step: tuple[float, int, int]) -> LoadReport:
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
        model.observe(speed_bounds_report(worker, n, (step_s, tokens, decodes)))


def coefficients(found: SpeedEstimate) -> tuple[float, float, float]:
    return found.base_s, 1 / found.prefill_tokens_per_s, found.per_decode_s


def test_the_reach_is_nothing_without_samples_and_doubles_at_every_dozen() -> None:
    assert reach(0) == 1.0
    assert reach(DOUBLING) == 2.0
    assert reach(3 * DOUBLING) == 8.0
    assert reach(OPEN_SAMPLES) >= 1000
    assert reach(10**9) < inf


@given(own=vectors, others=vectors, counts=speed_bounds_counts)
def test_a_bounded_coefficient_is_within_reach_of_the_others_and_no_nearer_to_them_than_needed(own, others, counts) -> None:
    found = bounded(own, others, counts)
    for value, learnt, other, count in zip(found, own, others, counts, strict=True):
        if min(counts) >= OPEN_SAMPLES or other / reach(count) <= learnt <= other * reach(count):
            assert value == learnt
        else:
            assert value == pytest.approx(other * reach(count) if learnt > other else other / reach(count))
            assert min(learnt, other) <= value * (1 + 1e-9)
            assert value * (1 - 1e-9) <= max(learnt, other)


@given(st.lists(st.tuples(vectors, speed_bounds_counts), min_size=1, max_size=8))
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
        model.observe(speed_bounds_report("a", n, one))
        model.observe(speed_bounds_report("b", n, other))
    a, b = model.estimate("a"), model.estimate("b")
    for mine, its in zip(coefficients(a), coefficients(b), strict=True):
        assert abs(log2(mine / its)) <= (a.samples + b.samples) / DOUBLING + 1e-6


def noisy_steps(model: Calibration) -> None:
    """Report six steps of two CPU engines; those of `b` seemed to take almost no time, as when two were read at once."""
    for n in range(6):
        take(model, "a", CPU, 1, start=n)
        model.observe(speed_bounds_report("b", n, (0.0019 + n * 1e-5, 340, 1)))


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
        model.observe(speed_bounds_report("new", n, (CPU[0] / 20 * (1 + n % 3 / 100), 0, 4 + n % 8)))
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
        model.observe(speed_bounds_report("new", n, (0.001 + n * 1e-6, 340, 1)))
    before = model.estimate("new").step_s(prefill_tokens=340, decodes=1)
    take(model, "known", CPU, 100)
    assert model.young == {"new", "known"}
    assert model.estimate("new").step_s(prefill_tokens=340, decodes=1) > 20 * before
    take(model, "known", CPU, OPEN_SAMPLES, start=100)
    assert model.young == {"new"}
    model.remove("new")
    assert model.young == set()
