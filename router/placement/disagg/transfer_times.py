"""Hand-over times, from a computed prompt to the first token on its decode worker, learnt from load reports.

    handover_s ≈ fixed_s + tokens fetched × per_token_s

They begin when the blocks are ready, and include messages, the transfer, and the decode worker's own first step.  Least
squares of relative errors with exponential forgetting, as in `calibration.py`, on two unknowns; samples far off (the decode
worker was busy with something else) count less, and a prior fades with the first dozens.
"""

from __future__ import annotations

from math import isfinite

from headrace.broker.messages import LoadReport

FORGETTING = 0.95  # per sample: about the last 20 count
PRIOR_SAMPLES = 3.0
PRIOR_FORGETTING = 0.9
HOLD = 0.02  # pull towards the present estimate, in samples
LEAST_FACTOR = 1e-3  # of the prior
MOST_S = 120.0  # a longer hand-over is not believed
MOST_TOKENS = 100_000_000
HUBER = 2.0
ERROR_GAIN = 0.1
LEAST_ERROR = 0.02


class TransferTimes:
    """The model of one pool. It has one for all workers, because the pairs that hand over change from prompt to prompt."""

    def __init__(self, *, fixed_s: float, per_token_s: float) -> None:
        """Assume these at first; both are above 0."""
        self._prior = (fixed_s, per_token_s)
        self._factors = (1.0, 1.0)  # estimate = prior × factors
        self._prior_weight = PRIOR_SAMPLES
        self._a = [0.0, 0.0, 0.0]  # 00 01 11
        self._b = [0.0, 0.0]
        self._error = 0.5
        self._last: dict[str, tuple[float, int]] = {}
        self.samples = 0

    @property
    def fixed_s(self) -> float:
        return self._prior[0] * self._factors[0]

    @property
    def per_token_s(self) -> float:
        return self._prior[1] * self._factors[1]

    def seconds(self, tokens: float) -> float:
        """Predict the hand-over time for this many fetched tokens."""
        return self.fixed_s + tokens * self.per_token_s

    def observe(self, report: LoadReport) -> bool:
        """Learn from the report of a decode worker. Return False if it has nothing new, or nothing that can be believed."""
        sample = (report.handover_s, report.handover_tokens)
        if sample == self._last.get(report.worker, (0.0, 0)):
            return False
        self._last[report.worker] = sample
        took_s, tokens = sample
        if not (isfinite(took_s) and 0 < took_s <= MOST_S and 0 <= tokens <= MOST_TOKENS):
            return False
        self._learn(took_s, tokens)
        self.samples += 1
        return True

    def remove(self, worker: str) -> None:
        """Drop a worker that has left, and keep what was learnt from it. An unknown one is ignored."""
        self._last.pop(worker, None)

    def _learn(self, took_s: float, tokens: int) -> None:
        predicted = self.seconds(tokens)
        error = took_s / predicted - 1.0
        size, bound = abs(error), HUBER * self._error
        weight = bound / size if size > bound else 1.0
        self._error = max(self._error + ERROR_GAIN * (min(size, 3.0 * bound) - self._error), LEAST_ERROR)
        self._prior_weight *= PRIOR_FORGETTING
        scale = max(predicted, took_s if weight >= 1.0 else 0.0)
        z0, z1, target = self._prior[0] / scale, self._prior[1] * tokens / scale, took_s / scale
        a, b = self._a, self._b
        a[0] = FORGETTING * a[0] + weight * z0 * z0
        a[1] = FORGETTING * a[1] + weight * z0 * z1
        a[2] = FORGETTING * a[2] + weight * z1 * z1
        b[0] = FORGETTING * b[0] + weight * z0 * target
        b[1] = FORGETTING * b[1] + weight * z1 * target
        self._solve()

    def _solve(self) -> None:
        """Find the factors that fit best, none below LEAST_FACTOR: one that is gets it, and the other is solved alone."""
        old0, old1 = self._factors
        hold0, hold1 = HOLD / max(old0, 1.0) ** 2, HOLD / max(old1, 1.0) ** 2
        pull = self._prior_weight
        a00, a01, a11 = self._a[0] + hold0 + pull, self._a[1], self._a[2] + hold1 + pull
        b0, b1 = self._b[0] + hold0 * old0 + pull, self._b[1] + hold1 * old1 + pull
        determinant = a00 * a11 - a01 * a01
        if determinant > 1e-12 * a00 * a11:
            x0, x1 = (b0 * a11 - b1 * a01) / determinant, (b1 * a00 - b0 * a01) / determinant
        else:
            x0, x1 = old0, old1
        if x0 < LEAST_FACTOR:
            x0, x1 = LEAST_FACTOR, (b1 - a01 * LEAST_FACTOR) / a11
        if x1 < LEAST_FACTOR:
            x0, x1 = max((b0 - a01 * LEAST_FACTOR) / a00, LEAST_FACTOR), LEAST_FACTOR
        self._factors = (x0, x1)
