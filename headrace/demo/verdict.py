"""Compares the answer that lost its worker with an undisturbed one, and says what happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from headrace.chat.streamed_answer import Answer

ON_THE_WAY = 5  # most pieces that a worker can have sent and the client not read when it dies


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The death of a worker. `seen` pieces of the answer had been read when it was killed."""

    worker: str
    pid: int
    seen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of the demo. `problems` is empty if every promise was kept."""

    before: int  # pieces that came before the pause, a token each
    after: int
    pause_s: float
    usual_s: float  # between two pieces
    problems: tuple[str, ...]


def judge(answer: Answer, undisturbed: Answer, death: Death, *, workers: Sequence[str]) -> Verdict:
    """Judge. `workers` are those that had the request, in order, as the frontend has logged them."""
    gaps = [later - earlier for earlier, later in pairwise(answer.arrived_s)]
    after = range(max(death.seen - 1, 0), min(death.seen + ON_THE_WAY, len(gaps)))
    at = max(after, key=gaps.__getitem__, default=0)
    return Verdict(
        before=at + 1,
        after=len(answer.pieces) - at - 1,
        pause_s=gaps[at] if gaps else 0.0,
        usual_s=median(gaps) if gaps else 0.0,
        problems=tuple(_problems(answer, undisturbed, death, workers)),
    )


def _problems(answer: Answer, undisturbed: Answer, death: Death, workers: Sequence[str]) -> list[str]:
    problems = []
    if len(workers) < 2 or not workers[0].startswith(f"{death.worker}-"):
        problems.append(f"the answer was made by {', '.join(workers) or 'no worker'}, and {death.worker} was killed")
    if answer.text != undisturbed.text:
        at = next((n for n, (a, b) in enumerate(zip(answer.text, undisturbed.text, strict=False)) if a != b), None)
        place = min(len(answer.text), len(undisturbed.text)) if at is None else at
        problems.append(
            f"the texts differ from character {place} on: {answer.text[place : place + 40]!r} "
            f"in place of {undisturbed.text[place : place + 40]!r}"
        )
    for name in ("tokens", "finish_reason"):
        mine, other = getattr(answer, name), getattr(undisturbed, name)
        if mine != other:
            problems.append(f"{name} is {mine} in place of {other}")
    return problems
