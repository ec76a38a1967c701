"""Simulates one engine in virtual time, step by step: chunked prefill and decode in the same steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from headrace.planner.observation import StepSight
from headrace.planner.speed_curve import Speed

STEP_TOKENS = 2048


@dataclass(slots=True)
class Request:
    """A request of the past and what became of it. Times are seconds of the replay."""

    at: float
    prompt: int
    uncached: int
    output: int
    placed_s: float | None = None
    first_s: float | None = None
    end_s: float | None = None
    done: int = 0  # tokens of output
    left: int = field(default=0)  # prompt tokens to compute

    @property
    def ttft_s(self) -> float:
        """Time from its arrival to its first token, infinite while it has none."""
        return float("inf") if self.first_s is None else self.first_s - self.at

    @property
    def itl_s(self) -> float:
        """Mean time between its tokens, infinite before its end."""
        if self.first_s is None or self.end_s is None:
            return float("inf")
        return (self.end_s - self.first_s) / (self.output - 1) if self.output > 1 else 0.0

    def met(self, *, ttft_s: float, itl_s: float) -> bool:
        """Return whether it had its first token and the mean time between tokens within the targets."""
        return self.ttft_s <= ttft_s and self.itl_s <= itl_s


@dataclass(slots=True)
class Engine:
    """An engine that serves from `ready_s` on. `busy_s`: end of the step that runs."""

    name: str
    speed: Speed
    slots: int
    began_s: float
    ready_s: float
    draining: bool = False
    running: list[Request] = field(default_factory=list)
    prefills: deque[Request] = field(default_factory=deque)
    step: tuple[float, float, list[Request], list[Request]] | None = (
        None  # begin, end, those that decode, those that are prefilled
    )
    last: StepSight | None = None

    @property
    def held(self) -> int:
        """Requests that it has."""
        return len(self.running) + len(self.prefills) + (len(self.step[3]) if self.step is not None else 0)

    def has_room(self, now_s: float) -> bool:
        """Return whether it takes one more: a slot is free, and less than a step of prompt waits."""
        if self.draining or now_s < self.ready_s or self.held >= self.slots:
            return False
        return sum(one.left for one in self.prefills) < STEP_TOKENS

    def take(self, request: Request, now_s: float) -> None:
        """Start a request."""
        request.placed_s, request.left = now_s, max(1, request.uncached)
        self.prefills.append(request)

    def begin(self, now_s: float) -> float | None:
        """Begin a step and return its end, None if there is nothing to do or one runs."""
        if self.step is not None or not self.held:
            return None
        budget, prefilled, computed = STEP_TOKENS - len(self.running), [], 0
        while self.prefills and computed < budget:
            first = self.prefills[0]
            part = min(first.left, budget - computed)
            first.left -= part
            computed += part
            if first.left:
                break
            prefilled.append(self.prefills.popleft())
        context = sum(one.prompt + one.done for one in self.running)
        speed = self.speed
        took_s = speed.base_s + computed * speed.prefill_s + len(self.running) * speed.decode_s + context * speed.context_s
        self.step = (now_s, now_s + took_s, list(self.running), prefilled)
        self.last = StepSight(step_s=took_s, prefill_tokens=computed, decodes=len(self.running), context_tokens=context)
        return now_s + took_s

    def finish(self) -> list[Request]:
        """End the step and return the requests that have ended with it."""
        if self.step is None:
            return []
        _, end_s, decoded, prefilled = self.step
        self.step = None
        for one in prefilled:
            one.first_s, one.done = end_s, 1
            self.running.append(one)
        for one in decoded:
            one.done += 1
        ended = [one for one in self.running if one.done >= one.output]
        if ended:
            for one in ended:
                one.end_s = end_s
            self.running = [one for one in self.running if one.end_s is None]
        return ended
