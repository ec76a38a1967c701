"""Predicts when the prompt of a placed request will be computed, and learns from each one how far that was off. Sans-io.

    seconds = (rest of the running step + steps of the prompts before it and of its own) × what such requests have taken of that

An engine begins with a prompt when its step has ended (`engine_now.py`).  What is in no such model (messages on their way,
noise, an engine that batches otherwise, prompts that come to be computed beside it) is a factor, learnt as the running median
of measured over predicted seconds: by fleet, by powers of four of the uncached tokens, and by what the engine was at
(`medians.py`).

Predicted so are requests in a pool of several fleets, and those that ask for a time to first token in any pool; and to these
it is promised (`promises.py`).
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import NamedTuple

from headrace.broker.messages import JobEvent
from headrace.router.index.types import Overlap
from headrace.router.placement.disagg_planner import DisaggPlan
from headrace.router.placement.first_tokens.engine_now import EngineNow, engine_now, until_computed_s, until_last_step_s
from headrace.router.placement.first_tokens.medians import Bucket, Medians, bucket_of
from headrace.router.placement.first_tokens.promises import Promises
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.placements import uncached_tokens
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Waiting

MOST_OPEN = 20_000  # placements remembered until their prompts are computed
LEAST_WAY_S = 1e-4  # of a message, either way, until more is learnt
WAY_GAIN = 0.1  # the longest step of that, in parts of it
ASKED_S = 60.0  # after a request that asked for a time, placements of other routers are taken for such


class _Open(NamedTuple):
    """A prediction whose outcome is not known."""

    bucket: Bucket
    placed_s: float
    seconds: float  # without the factor


class FirstTokens:
    """Predicts for one router. Times are seconds of the scheduler's clock."""

    def __init__(self, loads: LoadTable, settings: SchedulerSettings) -> None:
        self._loads = loads
        self._assumed = settings.calibration.prefill_tokens_per_s
        self._medians = Medians()
        self._open: dict[tuple[str, int], _Open] = {}
        self._ended: dict[str, float] = {}  # by worker: when a step is known to have ended
        self._way_s = LEAST_WAY_S
        self._asked_s = -inf
        self.promises = Promises(loads, settings.promise)

    def __len__(self) -> int:
        return len(self._open)

    def tells(self, request: Waiting) -> bool:
        """Return whether a time to first token is predicted and promised to a request."""
        return request.ttft_target_s is not None or len(self._loads.fleets) > 1

    def foresee(self, request: Waiting, load: WorkerLoad, plan: DisaggPlan, overlap: Overlap, now_s: float) -> DisaggPlan:
        """Return the plan of a request that is placed now with the time to its first token as `predict` has it.

        That of a request to which nothing is told is left as it is.
        """
        if not self.tells(request):
            return plan
        self._asked_s = now_s
        return replace(plan, wait_s=0.0, service_s=self.predict(request, load, plan, overlap, now_s))

    def predict(self, request: Waiting, load: WorkerLoad, plan: DisaggPlan, overlap: Overlap, now_s: float) -> float:
        """Predict the seconds from now until the prompt of a request that is placed now is computed, and remember that."""
        tokens = uncached_tokens(request, overlap)
        if plan.remote:
            seconds = plan.wait_s + plan.service_s
            bucket = bucket_of(load.info.fleet, tokens, "remote")
        else:
            engine = self._engine(load, now_s)
            seconds = until_computed_s(engine, tokens)
            if load.speed.prefill_tokens_per_s == self._assumed:  # by the settings: no step of its fleet has been learnt from
                bucket = bucket_of(load.info.fleet, 1, "cold")
            else:
                bucket = bucket_of(load.info.fleet, tokens, engine.state)
        self._open[request.id, request.attempt] = _Open(bucket, now_s, seconds)
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
        seconds *= self._medians.factor(bucket)
        if not plan.remote:
            self._promise(load, engine, tokens, request.age_s(now_s) + seconds, now_s)
        return seconds

    def placed_elsewhere(self, event: JobEvent, now_s: float) -> None:
        """Promise the same for a placement of another router, whose request came now as far as is known."""
        if len(self._loads.fleets) <= 1 and now_s - self._asked_s > ASKED_S:
            return
        load = self._loads.get(event.worker)
        if load is not None and not event.prefill:
            engine, tokens = self._engine(load, now_s), float(event.uncached or event.tokens)
            self._promise(load, engine, tokens, until_computed_s(engine, tokens), now_s)

    def on_event(self, event: JobEvent, now_s: float) -> None:
        """Learn when a prompt is computed; forget the predictions of requests that have ended."""
        kind = event.kind
        if kind == "started":
            found = self._open.get((event.id, event.attempt)) if self._open else None
            if found is not None:
                self._note_way(0.5 * (now_s - found.placed_s))
            return
        if kind not in ("prefilled", "settled", "moved"):
            return
        if kind != "moved":
            self._ended[event.worker] = now_s - self._way_s
        found = self._open.pop((event.id, event.attempt), None) if self._open else None
        if found is not None and kind == "prefilled":
            measured_s = now_s - self._way_s - found.placed_s
            self._medians.observe(found.bucket, predicted_s=found.seconds, measured_s=measured_s)

    def _note_way(self, way_s: float) -> None:
        """Follow the median of what messages take, in steps of bounded size."""
        self._way_s = min(max(way_s, self._way_s * (1 - WAY_GAIN)), self._way_s * (1 + WAY_GAIN) + LEAST_WAY_S)

    def remove_worker(self, worker: str) -> None:
        """Forget a worker that has left."""
        self._ended.pop(worker, None)

    def _engine(self, load: WorkerLoad, now_s: float) -> EngineNow:
        ended_s = self._ended.get(load.info.worker, -inf)
        return engine_now(load, now_s, ended_s=ended_s, way_s=self._way_s)

    def _promise(self, load: WorkerLoad, engine: EngineNow, tokens: float, ttft_s: float, now_s: float) -> None:
        takes_s = min(tokens, engine.step_tokens) * engine.token_s
        begins_s = now_s + until_last_step_s(engine, tokens)
        self.promises.note(load.info.worker, begins_s=begins_s, takes_s=takes_s, ttft_s=ttft_s, now_s=now_s)
