"""Calibration: the speed of each worker is learnt from the step times in its load reports.

    step_s ≈ base_s + prefill tokens / prefill_tokens_per_s + sequences that decode × per_decode_s

Weighted recursive least squares with exponential forgetting (Ljung and Söderström, "Theory and Practice of Recursive
Identification", 1983), in information form: three sums of products that fade by `forgetting` with every sample, and a 3 × 3
system. Added to it are

- relative errors: a sample is divided by the step time predicted for it, so that decode steps of 8 ms count as much as prefill
  steps of 300 ms, and unknowns are factors of the prior's values;
- Huber's weights (Huber 1964) for samples far from what is predicted, by a running mean of the absolute error;
- a prior that is scaled as a whole by the median of the first samples, for it may be of quite another machine;
- a fresh start from the present estimate, scaled by the next samples like a prior, once errors keep their sign (a geometric
  moving average of them, Roberts 1959, leaves its bounds): the engine has changed;
- a little pull towards the present estimate, so that a coefficient of which the samples say nothing (no prefill for an hour)
  stays where it is while its evidence fades, and one towards the prior, which is gone after a few dozen samples;
- bounds above zero, by projected Gauss-Seidel where the plain solution leaves them.

What is learnt of a few noisy steps is bounded before it is used (`speed_bounds.py`): from below by the prior, and on both sides
by the pool, with bounds that open with every sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import median

from headrace.broker.messages.events import LoadReport
from headrace.router.placement.settings import LEAST_S, MOST_S, CalibrationSettings

# Bounds for what a few samples say of a worker's speed.
#
# A coefficient of the model of step times (`calibration.py`) is used as learnt only within a factor of what it is compared
# with. The factor is 1 without samples and doubles with every `DOUBLING` samples that the coefficient took part in. So a
# handful of noisy steps cannot make a worker many times cheaper than its neighbours, and one that is really 20 times as fast
# is judged so after 12 × log2(20), about 52 steps. In between it is judged as near to the truth as the factor allows.

Vector = tuple[float, float, float]  # seconds of a step, of a prefill token, of a decoding sequence
Counts = tuple[int, int, int]  # samples that each of them took part in

DOUBLING = 12  # samples
OPEN_SAMPLES = 120  # from here on, a factor of 1000, a bound is as good as none


_MOST = 1000  # samples; more allow no more
_REACH = [float(2.0 ** (samples / DOUBLING)) for samples in range(_MOST + 1)]


def reach(samples: int) -> float:
    """Return the factor by which a coefficient of so many samples may differ from what it is compared with."""
    return _REACH[min(_MOST, samples)]


def bounded(own: Vector, others: Vector, counts: Counts) -> Vector:
    """Return the coefficients of a worker, each no further from that of the others than its samples reach."""
    if min(counts) >= OPEN_SAMPLES:
        return own
    kept = []
    for value, other, count in zip(own, others, counts, strict=True):
        factor = _REACH[min(_MOST, count)]
        if value < other / factor:
            kept.append(other / factor)
        elif value > other * factor:
            kept.append(other * factor)
        else:
            kept.append(value)
    return kept[0], kept[1], kept[2]


def weighted_mean(known: Sequence[tuple[Vector, Counts]], most: float) -> Vector:
    """Return the mean of the coefficients, each weighted by its samples, of which at most `most` count.

    Of a coefficient that no sample took part in, the plain mean. `known` is not empty.
    """
    return _mean_of(known, 0, most), _mean_of(known, 1, most), _mean_of(known, 2, most)


def _mean_of(known: Sequence[tuple[Vector, Counts]], which: int, most: float) -> float:
    plain = weighted = weights = 0.0
    for values, counts in known:
        weight = min(counts[which], most)
        plain += values[which]
        weighted += values[which] * weight
        weights += weight
    return weighted / weights if weights else plain / len(known)


MOST_COUNT = 1e8  # tokens or sequences of a step that can be believed
HUBER = 2.0  # mean absolute errors beyond which a sample counts less
ERROR_GAIN = 0.05  # of the running mean of absolute errors
LEAST_ERROR = 0.01  # relative; clocks are no better
MOST_ERROR = 0.5  # counted in the running mean of signed errors, lest one outlier shift it
DRIFT_GAIN = 0.1  # of that mean
DRIFT = 0.2  # a larger one says that the engine has changed
SETTLING = 20  # samples after a start before that is looked at
PRIOR_FORGETTING = 0.9
HOLD = 0.02  # pull towards the present estimate, in samples
SWEEPS = 30
LEAST_SHARE = 0.05  # of what the first prior says of a coefficient beside the others: a smaller one is no prior


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """Speed of one worker. All figures are above zero and finite; `samples`: steps it was learnt from."""

    base_s: float
    prefill_tokens_per_s: float
    per_decode_s: float
    samples: int = 0

    def step_s(self, *, prefill_tokens: float, decodes: float) -> float:
        return self.base_s + prefill_tokens / self.prefill_tokens_per_s + decodes * self.per_decode_s


class StepTimes:
    """The model of one worker. `prior`: seconds of a step, of a prefill token and of a decoding sequence."""

    __slots__ = (
        "_a",
        "_b",
        "_coefficients",
        "_counts",
        "_drift",
        "_error",
        "_factors",
        "_first",
        "_last",
        "_origin",
        "_prior",
        "_prior_weight",
        "_settings",
        "counts",
    )

    def __init__(self, settings: CalibrationSettings, prior: Vector) -> None:
        self._settings = settings
        self.counts: Counts = (0, 0, 0)
        self._origin = prior
        self.restart(prior)

    def restart(self, prior: Vector) -> None:
        """Forget all samples and assume this prior.

        As unknowns are factors of the prior's values, a coefficient that a few outliers have driven to almost zero could not be
        learnt any more: it is assumed to be small instead.
        """
        share = LEAST_SHARE * median(value / first for value, first in zip(prior, self._origin, strict=True))
        base_s, per_token_s, per_decode_s = (
            max(value, share * first) for value, first in zip(prior, self._origin, strict=True)
        )
        self._prior = base_s, per_token_s, per_decode_s
        self._coefficients: Vector | None = None  # None: to be computed
        self._factors = [1.0, 1.0, 1.0]  # estimate = prior × factors
        self._prior_weight = self._settings.prior_samples
        self._a = [0.0] * 6  # upper triangle: 00 01 02 11 12 22
        self._b = [0.0] * 3
        self._error = 1.0
        self._drift = 0.0
        self._last: Vector = (0.0, 0.0, 0.0)
        self._first: list[Vector] = []
        self._counts: Counts = (0, 0, 0)  # samples since

    @property
    def samples(self) -> int:
        return self.counts[0]

    @property
    def coefficients(self) -> Vector:
        """The present estimate, in the order of the prior.

        A coefficient that few samples say something of is no smaller than `LEAST_SHARE` of the scaled prior.
        """
        if self._counts[0] < self._settings.min_samples:
            return self._prior
        if self._coefficients is None:
            kept = []
            for prior, factor, count in zip(self._prior, self._factors, self._counts, strict=True):
                kept.append(min(max(prior * max(factor, LEAST_SHARE / reach(count)), LEAST_S), MOST_S))
            self._coefficients = kept[0], kept[1], kept[2]
        return self._coefficients

    def observe(self, step_s: float, *, prefill_tokens: float, decodes: float) -> str:
        """Learn from a step. Return why it was not used, else "" (`repeated`: the very same step was reported before)."""
        why = self._why_not(step_s, prefill_tokens, decodes)
        if why:
            return why
        if (step_s, prefill_tokens, decodes) == self._last:
            return "repeated"
        self._coefficients = None
        self._last = (step_s, prefill_tokens, decodes)
        self.counts = _counted(self.counts, prefill_tokens, decodes)
        self._counts = _counted(self._counts, prefill_tokens, decodes)
        seen = self._counts[0]
        if seen < self._settings.min_samples:
            self._first.append(self._last)
            return ""
        if seen == self._settings.min_samples:
            self._scale_prior([*self._first, self._last])
            for sample in self._first:
                self._learn(*sample)
            self._first.clear()
        self._learn(*self._last)
        if seen > SETTLING and abs(self._drift) > DRIFT:
            self.restart(self.coefficients)
        return ""

    def _parts(self, prefill_tokens: float, decodes: float) -> Vector:
        return self._prior[0], self._prior[1] * prefill_tokens, self._prior[2] * decodes

    def _scale_prior(self, samples: list[Vector]) -> None:
        scale = median(step_s / sum(self._parts(prefill_tokens, decodes)) for step_s, prefill_tokens, decodes in samples)
        first, second, third = (min(max(value * scale, LEAST_S), MOST_S) for value in self._prior)
        self._prior = first, second, third

    def _learn(self, step_s: float, prefill_tokens: float, decodes: float) -> None:
        factors, parts = self._factors, self._parts(prefill_tokens, decodes)
        predicted = parts[0] * factors[0] + parts[1] * factors[1] + parts[2] * factors[2]
        error = step_s / predicted - 1.0
        size, bound = abs(error), HUBER * self._error
        weight = bound / size if size > bound else 1.0
        # Weighted by the larger of both times: what came before the engine slowed down would else outweigh all that follows.
        scale = max(predicted, step_s if weight >= 1.0 else 0.0)
        self._error = max(self._error + ERROR_GAIN * (min(size, 3.0 * bound) - self._error), LEAST_ERROR)
        self._drift += DRIFT_GAIN * (max(-MOST_ERROR, min(MOST_ERROR, error)) - self._drift)
        keep = self._settings.forgetting
        self._prior_weight *= PRIOR_FORGETTING
        a, b = self._a, self._b
        z0, z1, z2, target = parts[0] / scale, parts[1] / scale, parts[2] / scale, step_s / scale
        a[0] = keep * a[0] + weight * z0 * z0
        a[1] = keep * a[1] + weight * z0 * z1
        a[2] = keep * a[2] + weight * z0 * z2
        a[3] = keep * a[3] + weight * z1 * z1
        a[4] = keep * a[4] + weight * z1 * z2
        a[5] = keep * a[5] + weight * z2 * z2
        b[0] = keep * b[0] + weight * z0 * target
        b[1] = keep * b[1] + weight * z1 * target
        b[2] = keep * b[2] + weight * z2 * target
        self._solve()

    def _why_not(self, step_s: float, prefill_tokens: float, decodes: float) -> str:
        if step_s == 0.0 or (prefill_tokens == 0 and decodes == 0):
            return "no_step"
        if not (isfinite(step_s) and isfinite(prefill_tokens) and isfinite(decodes)):
            return "not_finite"
        if step_s < 0 or prefill_tokens < 0 or decodes < 0:
            return "negative"
        if step_s > self._settings.most_step_s or prefill_tokens > MOST_COUNT or decodes > MOST_COUNT:
            return "too_large"
        return ""

    def _solve(self) -> None:
        """Find the factors that fit best. With the pulls on its diagonal the system is positive definite."""
        a, b, old = self._a, self._b, self._factors
        least = [LEAST_S / prior for prior in self._prior]
        hold = [HOLD / max(factor, 1.0) ** 2 for factor in old]  # never so strong that a factor near zero stays there
        pull = self._prior_weight
        a00, a11, a22 = a[0] + hold[0] + pull, a[3] + hold[1] + pull, a[5] + hold[2] + pull
        a01, a02, a12 = a[1], a[2], a[4]
        b0, b1, b2 = b[0] + hold[0] * old[0] + pull, b[1] + hold[1] * old[1] + pull, b[2] + hold[2] * old[2] + pull
        # Cholesky: as exact as it gets for three unknowns, and it tells when rounding has eaten the pulls.
        l00 = a00**0.5
        l10, l20 = a01 / l00, a02 / l00
        d11 = a11 - l10 * l10
        if d11 > 1e-12 * a11:
            l11 = d11**0.5
            l21 = (a12 - l20 * l10) / l11
            d22 = a22 - l20 * l20 - l21 * l21
            if d22 > 1e-12 * a22:
                y0 = b0 / l00
                y1 = (b1 - l10 * y0) / l11
                x2 = (b2 - l20 * y0 - l21 * y1) / d22
                x1 = (y1 - l21 * x2) / l11
                x0 = (y0 - l10 * x1 - l20 * x2) / l00
                if x0 >= least[0] and x1 >= least[1] and x2 >= least[2]:
                    self._factors = [x0, x1, x2]
                    return
        x0, x1, x2 = (max(factor, bound) for factor, bound in zip(old, least, strict=True))
        for _ in range(SWEEPS):
            x0 = max((b0 - a01 * x1 - a02 * x2) / a00, least[0])
            x1 = max((b1 - a01 * x0 - a12 * x2) / a11, least[1])
            x2 = max((b2 - a02 * x0 - a12 * x1) / a22, least[2])
        self._factors = [x0, x1, x2]


def _counted(counts: Counts, prefill_tokens: float, decodes: float) -> Counts:
    return counts[0] + 1, counts[1] + (prefill_tokens > 0), counts[2] + (decodes > 0)


class Calibration:
    """Keeps the models of all workers of a fleet. A worker of which too little is known is assumed to be like the others.

    The workers of a pool are compared with each other: one that is judged by what its engine does, beside one that is still
    judged by the settings, would be the cheaper one by orders of magnitude, whatever the other has in its cache. So would one
    of which a few steps seemed to take no time, beside one that is judged right.
    """

    def __init__(self, settings: CalibrationSettings) -> None:
        self._settings = settings
        self._default: Vector = (settings.base_s, 1.0 / settings.prefill_tokens_per_s, settings.per_decode_s)
        self._workers: dict[str, StepTimes] = {}
        self._epochs: dict[str, int] = {}
        self._mean = self._default
        self._mean_age = 0  # samples since it was taken
        self._mean_of = 0  # workers that it was taken of
        self.young: set[str] = set()  # workers that have reported, and are still judged by the others, too
        self.unused: Counter[str] = Counter()  # reported steps that taught nothing, by reason

    def observe(self, report: LoadReport) -> bool:
        """Learn from a load report, whatever it says. Return whether the estimates of others may have changed by it.

        An engine that was started again is assumed to be as fast as it was.
        """
        worker = report.worker
        model = self._workers.get(worker)
        if model is None:
            model = self._workers[worker] = StepTimes(self._settings, self._mean)
            self.young.add(worker)
        elif self._epochs[worker] != report.epoch:
            model.restart(model.coefficients)
        self._epochs[worker] = report.epoch
        why = model.observe(report.step_s, prefill_tokens=report.step_prefill_tokens, decodes=report.step_decodes)
        if why:
            self.unused[why] += 1
            return False
        samples = model.samples
        if samples < self._settings.min_samples:
            return False
        if samples >= max(OPEN_SAMPLES, self._settings.min_samples):
            self.young.discard(worker)
        self._mean_age += 1
        if self._mean_age * 8 < self._mean_of:
            return False
        self._take_mean()
        return True

    def remove(self, worker: str) -> None:
        if self._workers.pop(worker, None) is not None:
            self._take_mean()
        self._epochs.pop(worker, None)
        self.young.discard(worker)

    def estimate(self, worker: str) -> SpeedEstimate:
        """Return the speed of a worker; of one that is not known well enough, the pool's."""
        model = self._workers.get(worker)
        if model is None:
            return self.pool()
        samples = model.samples
        if samples < self._settings.min_samples:
            return replace(self.pool(), samples=samples)
        base_s, per_token_s, per_decode_s = bounded(model.coefficients, self._mean, model.counts)
        return SpeedEstimate(base_s, 1.0 / per_token_s, per_decode_s, samples)

    def pool(self) -> SpeedEstimate:
        base_s, per_token_s, per_decode_s = self._mean
        return SpeedEstimate(base_s, 1.0 / per_token_s, per_decode_s)

    def _take_mean(self) -> None:
        """Take the mean again: O(workers), so only after one sample for each eight that it was taken of."""
        known = [model for model in self._workers.values() if model.samples >= self._settings.min_samples]
        most = 1.0 / (1.0 - self._settings.forgetting)
        self._mean_of = len(known)
        self._mean = weighted_mean([(model.coefficients, model.counts) for model in known], most) if known else self._default
        self._mean_age = 0
