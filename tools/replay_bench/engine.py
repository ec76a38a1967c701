"""The engine of the benchmark: step-level, with a prefix cache, in virtual time.

A step has a budget of prompt tokens. First goes the prompt that is partly done, then waiting ones in the order of arrival, as
long as there are budget and slots. On admission the cached prefix is skipped and all blocks of the prompt are touched in the
LRU cache, its tail first to go. Every sequence whose prompt is complete gets a token in the step, in the very step that
completes it too. A step takes `base_s`, plus the prompt tokens of it at `prefill_rate`, plus `decode_s` for each sequence that
gets a token.

While nothing is left to prefill or to admit, steps are alike and are taken together; an arrival ends them at the next step.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.router.replay import PrefixCache
from headrace.tools.replay_bench.trace import BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """Speed and size of an engine: a mid-size model on one accelerator. `blocks` is the size of its cache."""

    blocks: int
    context: int = 0  # most tokens of a request, 0 = any
    slots: int = 64
    step_tokens: int = 8192
    prefill_rate: float = 24_000.0  # tokens/s
    base_s: float = 0.008
    decode_s: float = 0.000_08


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFleet:
    """Workers of a pool that are alike, and what one of them costs for an hour."""

    name: str = ""
    price: float = 0.0
    workers: int
    model: EngineModel


@dataclass(slots=True, kw_only=True)
class ReplayJob:
    """A request on its way through an engine, and its outcome. Times are seconds, -1 = not yet."""

    index: int
    request: TraceRequest
    worker: int = -1
    arrived_s: float = -1.0  # at the worker
    admitted_s: float = -1.0
    first_s: float = -1.0  # first token
    end_s: float = -1.0
    cached_blocks: int = 0
    uncached: int = 0  # tokens to be prefilled, by the cache on arrival, and from its admission on by the cache then
    left: int = 0  # prompt tokens still to be computed


@dataclass(slots=True)
class Step:
    """The outcome of a step, or of several alike."""

    prefilled: list[ReplayJob] = field(default_factory=list)
    settled: list[ReplayJob] = field(default_factory=list)
    stored: Sequence[int] = ()
    removed: Sequence[int] = ()

    @property
    def changed(self) -> bool:
        return bool(self.prefilled or self.settled or self.stored or self.removed)


class ModelledEngine:
    """Models the engine of a worker.

    The caller keeps the clock: it calls `end_step` at `step_ends_s`, which `submit` may bring forward.
    """

    def __init__(self, model: EngineModel, *, index: int = 0) -> None:
        self.index = index
        self.model = model
        self.cache = PrefixCache(model.blocks)
        self.step_ends_s: float | None = None  # None = idle
        # These are of the step that runs, or of the last one.
        self.step_s = 0.0
        self.step_prefill_tokens = 0
        self.step_decodes = 0
        self.blocks_used = 0
        self.queued_prefill_tokens = 0  # of prompts, and parts of them, that no step has begun with
        self._waiting: deque[ReplayJob] = deque()
        self._partial: ReplayJob | None = None  # the request whose prompt is partly computed: at most one
        self._done: list[ReplayJob] = []  # requests whose prompt this step completes
        self._decoding: list[tuple[int, int, ReplayJob]] = []  # heap by the number of the step that gives the last token
        self._step = 0  # number of the last step of those that run together
        self._began_s = 0.0
        self._alike = 1  # steps that run together

    @property
    def running(self) -> int:
        return len(self._decoding) + (self._partial is not None)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        return self.step_ends_s is None

    def prompt_tokens_left(self, now_s: float) -> int:
        """Estimate the prompt tokens still to be computed, of the step that runs and of those that no step has begun with."""
        left = self.queued_prefill_tokens
        if self.step_ends_s is not None and self.step_prefill_tokens:
            left += round(self.step_prefill_tokens * min(max((self.step_ends_s - now_s) / self.step_s, 0.0), 1.0))
        return left

    def submit(self, job: ReplayJob, now_s: float) -> None:
        """Queue a request.

        An idle engine begins a step at once, that is when `end_step` is called for this same instant, so that all requests that
        arrive together get into it.
        """
        job.worker, job.arrived_s = self.index, now_s
        job.uncached = _uncached(job, self.cache.match(job.request.chain))
        self.queued_prefill_tokens += job.uncached
        self._waiting.append(job)
        if self.step_ends_s is None:
            self.step_ends_s = now_s
        elif self._alike > 1 and self.running < self.model.slots:
            done = max(1, math.ceil((now_s - self._began_s) / self.step_s - 1e-9))
            if done < self._alike:
                self._step -= self._alike - done
                self._alike = done
                self.step_ends_s = self._began_s + done * self.step_s

    def end_step(self, now_s: float) -> Step:
        """End the running step, return its outcome, and begin the next one."""
        step = Step()
        for job in self._done:
            job.first_s = now_s
            step.prefilled.append(job)
        self._done = []
        decoding = self._decoding
        while decoding and decoding[0][0] <= self._step:
            job = heapq.heappop(decoding)[2]
            job.end_s = now_s
            self.blocks_used -= len(job.request.chain)
            step.settled.append(job)
        step.stored, step.removed = self.cache.changes()
        self._begin(now_s)
        return step

    def _begin(self, now_s: float) -> None:
        budget = self.model.step_tokens
        number = self._step + 1
        job = self._partial
        if job is not None:
            budget -= self._compute(job, budget, number)
        while self._waiting and budget > 0 and self.running < self.model.slots:
            job = self._waiting.popleft()
            self._admit(job, now_s)
            budget -= self._compute(job, budget, number)
        decodes = len(self._decoding)
        if not decodes and self._partial is None:
            self.step_ends_s = None
            self.step_s = 0.0
            self.step_prefill_tokens = self.step_decodes = 0
            self._alike = 1
            return
        tokens = self.model.step_tokens - budget
        self.step_prefill_tokens, self.step_decodes = tokens, decodes
        self.step_s = self.model.base_s + tokens / self.model.prefill_rate + self.model.decode_s * decodes
        # Without a prompt in hand nothing changes before a sequence ends: the waiting requests need its slot.
        self._alike = 1 if tokens else self._decoding[0][0] - self._step
        self._step += self._alike
        self._began_s = now_s
        self.step_ends_s = now_s + self._alike * self.step_s

    def _admit(self, job: ReplayJob, now_s: float) -> None:
        chain = job.request.chain
        self.queued_prefill_tokens -= job.uncached
        job.admitted_s = now_s
        job.cached_blocks = self.cache.match(chain)
        self.cache.touch(chain)
        job.uncached = job.left = _uncached(job, job.cached_blocks)
        self.queued_prefill_tokens += job.left
        self.blocks_used += len(chain)

    def _compute(self, job: ReplayJob, budget: int, number: int) -> int:
        """Compute a part of a prompt in the step `number`, and return its tokens."""
        tokens = min(budget, job.left)
        job.left -= tokens
        self.queued_prefill_tokens -= tokens
        if job.left:
            self._partial = job
            return tokens
        self._partial = None
        self._done.append(job)
        heapq.heappush(self._decoding, (number + job.request.output - 1, job.index, job))
        return tokens


def _uncached(job: ReplayJob, cached_blocks: int) -> int:
    """Count the tokens to be computed: at least the last one always is."""
    return max(job.request.tokens - cached_blocks * BLOCK_TOKENS, 1)
