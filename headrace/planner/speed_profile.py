"""Fits a profile to engine steps: the seconds of a step by role, from load reports, and how well they fit.

Unlike the curves of a running planner, which forget, a profile weighs all steps alike.
"""

from __future__ import annotations

from statistics import median

import msgspec

from headrace.planner.observation import ROLES, StepSight
from headrace.planner.speed_curve import LEAST_SAMPLES, Speed, SpeedCurve

NEAR = 0.2  # an error within this part of a step's time is near
SPREAD = 4.0  # largest over smallest number of sequences from which their cost can be told from that of the step itself


class RoleProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of a role. `error`: the median error of a step, in parts of its time. `near`: the share of steps within `NEAR`.

    `lacks`: what the steps did not vary in, so that a coefficient is a guess.
    """

    speed: Speed
    steps: int
    error: float
    near: float
    lacks: tuple[str, ...] = ()


class SpeedProfile:
    """The steps of one pool by role, each once."""

    def __init__(self) -> None:
        self._steps: dict[str, list[StepSight]] = {}
        self._last: dict[str, StepSight] = {}

    def note(self, role: str, worker: str, step: StepSight) -> bool:
        """Take the step that a report of `worker` tells of. Returns False for one that is left out.

        Reports tell of the last step until there is another one, so the first of a worker may be of any age.
        """
        if role not in ROLES or step.step_s <= 0 or step.prefill_tokens + step.decodes <= 0:
            return False
        before, self._last[worker] = self._last.get(worker), step
        if before in (None, step):
            return False
        self._steps.setdefault(role, []).append(step)
        return True

    def count(self, role: str) -> int:
        """Return the steps of a role."""
        return len(self._steps.get(role, ()))

    def roles(self) -> dict[str, RoleProfile]:
        """Return the profile of each role that has shown enough steps."""
        return {role: _fitted(role, steps) for role, steps in self._steps.items() if len(steps) >= LEAST_SAMPLES}


def _fitted(role: str, steps: list[StepSight]) -> RoleProfile:
    curve = SpeedCurve(fading=1.0)
    for one in steps:
        curve.learn(one.step_s, prefill_tokens=one.prefill_tokens, decodes=one.decodes, context_tokens=one.context_tokens)
    speed = curve.speed()
    errors = [abs(_step_s(speed, one) / one.step_s - 1) for one in steps]
    return RoleProfile(
        speed=speed,
        steps=len(steps),
        error=median(errors),
        near=sum(error <= NEAR for error in errors) / len(errors),
        lacks=tuple(_lacks(role, steps)),
    )


def _step_s(speed: Speed, step: StepSight) -> float:
    return (
        speed.base_s
        + step.prefill_tokens * speed.prefill_s
        + step.decodes * speed.decode_s
        + step.context_tokens * speed.context_s
    )


def _lacks(role: str, steps: list[StepSight]) -> list[str]:
    found = []
    prompts = [one.prefill_tokens for one in steps if one.prefill_tokens]
    decodes = [one.decodes for one in steps if one.decodes]
    if role != "decode" and len(prompts) < LEAST_SAMPLES:
        found.append(f"only {len(prompts)} steps computed a prompt")
    if role != "prefill" and (not decodes or max(decodes) < SPREAD * min(decodes)):
        seen = f"{min(decodes)} to {max(decodes)} sequences" if decodes else "no sequence"
        found.append(f"steps that decode had {seen}")
    return found
