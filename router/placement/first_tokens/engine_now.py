"""The state of an engine at the moment when a prompt is placed on it, worked out from its last report. Sans-io.

A report is old by a few milliseconds, in which an engine goes on: the step that ran has ended, and the next one has begun with
what was queued, and with what was placed since and has arrived.  So the steps since the report are gone through one by one,
each as long as the learnt curve says.  Steps that only decode are alike; when one of them ends follows from the last event that
came at the end of a step (a first token, or the end of an answer).  Of an engine without such an event half a step is assumed
to be left.
"""

from __future__ import annotations

from math import ceil, inf
from typing import NamedTuple

from headrace.router.placement.costs.cost import STEP_TOKENS
from headrace.router.placement.load import WorkerLoad

MOST_STEPS = 64  # gone through since a report: one that is older says nothing of now anyway
MOST_ALIKE = 64  # steps after an event of which it is known when they end: each is off by a little


class EngineNow(NamedTuple):
    """Work of an engine at the moment when a prompt that is placed now comes there."""

    running_s: float  # left of the step that runs
    before: float  # prompt tokens that no step has begun with
    step_s: float  # seconds of a step beside its prompts
    token_s: float
    step_tokens: float
    slot_wait_s: float  # until a slot is free
    way_s: float = 0.0  # until it comes there

    @property
    def state(self) -> str:
        """Name what makes a prompt wait."""
        return "filling" if self.before else "decoding" if self.running_s else "idle"


def engine_now(load: WorkerLoad, now_s: float, *, ended_s: float = -inf, way_s: float = 0.0) -> EngineNow:
    """Describe the engine of a worker by its last report and by what was placed on it since.

    `ended_s`: when a step is known to have ended. `way_s`: what a message takes, either way.
    """
    speed, report = load.speed, load.report
    token_s, step_tokens = 1.0 / speed.prefill_tokens_per_s, float(load.info.step_tokens or STEP_TOKENS)
    step_s = speed.step_s(prefill_tokens=0, decodes=load.running)
    running_s, before = 0.0, float(load.placed_tokens)
    if report is not None:
        comes_s, ends_s = now_s + way_s, load.reported_s - way_s
        queued, decodes = float(report.queued_prefill_tokens), report.running > 0
        decode_s = report.step_s or step_s
        if report.step_prefill_tokens and report.step_s:
            begun = min(queued, report.step_prefill_tokens)
            ends_s += report.step_s * begun / report.step_prefill_tokens
            queued -= begun
            decode_s = step_s
        elif decodes:
            ends_s += _rest_s(decode_s, ends_s, ended_s)
        coming = [(entry.placed_s + way_s, entry.tokens) for entry in load.entries.values()]
        for _ in range(MOST_STEPS):
            if ends_s >= comes_s:
                break  # this step runs then
            while coming and coming[0][0] <= ends_s:
                queued += coming.pop(0)[1]
            if not queued and (not coming or coming[0][0] >= comes_s):
                break  # it decodes, or idles
            if not queued:
                ends_s = coming[0][0]  # that one finds no other there
                continue
            taken = min(queued, step_tokens)
            ends_s += taken * token_s + step_s
            queued, decodes = queued - taken, True
        before = queued + sum(tokens for _, tokens in coming)
        running_s = ends_s - comes_s if ends_s > comes_s else _rest_s(decode_s, comes_s, ended_s) if decodes else 0.0
    slot_wait_s = load.slot_wait_s()
    return EngineNow(running_s, before, step_s, token_s, step_tokens, slot_wait_s if slot_wait_s < inf else 0.0, way_s)


def until_computed_s(engine: EngineNow, tokens: float) -> float:
    """Predict when a prompt of so many uncached tokens is computed, if nothing is placed beside it."""
    own = engine.before + tokens
    begins_s = engine.way_s + engine.running_s + engine.slot_wait_s
    return begins_s + own * engine.token_s + ceil(own / engine.step_tokens) * engine.step_s


def until_last_step_s(engine: EngineNow, tokens: float) -> float:
    """Predict when the step begins that completes such a prompt: until then others can still get into that step."""
    full = ceil((engine.before + tokens) / engine.step_tokens) - 1
    begins_s = engine.way_s + engine.running_s + engine.slot_wait_s
    return begins_s + full * (engine.step_tokens * engine.token_s + engine.step_s)


def _rest_s(decode_s: float, at_s: float, ended_s: float) -> float:
    """Return what is left at a time of the step that runs then, of steps that only decode."""
    if at_s - ended_s > MOST_ALIKE * decode_s:
        return 0.5 * decode_s
    return decode_s - (at_s - ended_s) % decode_s
