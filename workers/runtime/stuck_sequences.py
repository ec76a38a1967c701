"""Sequences that get nothing while the engine works on others: it has taken them in and will not answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import structlog

from headrace.broker.messages import JobFault
from headrace.broker.worker.ports import RunSink
from headrace.workers import metrics
from headrace.workers.runtime.choice import ChoiceRun

log = structlog.get_logger()


class Stuck(NamedTuple):
    """`seconds`: how long there was nothing."""

    choice: ChoiceRun
    seconds: float
    first: bool  # no token at all has come


class StuckSequences:
    """Looked at once a second or so, not at every token: the token path knows nothing of it."""

    def __init__(self, *, first_token_s: float, token_s: float) -> None:
        """Longest wait for the first token of a sequence, and for each one after it."""
        self._first_token_s = first_token_s
        self._token_s = token_s
        self._seen: dict[str, tuple[int, float]] = {}  # tokens it had, and since when it has no more

    def check(self, now_s: float, active: Iterable[ChoiceRun]) -> list[Stuck]:
        """Those that have waited for too long. What is not active any more is forgotten."""
        seen, self._seen, stuck = self._seen, {}, []
        for choice in active:
            tokens = len(choice.run.choices[choice.choice].ids)
            before = seen.get(choice.id)
            since_s = now_s if before is None or before[0] != tokens else before[1]
            self._seen[choice.id] = tokens, since_s
            if choice.came is not None and not choice.came.done():
                continue  # a hand-over, which has a time limit of its own
            first = not choice.first_s
            if now_s - since_s > (self._first_token_s if first else self._token_s):
                stuck.append(Stuck(choice, now_s - since_s, first))
        return stuck


def give_up(stuck: Stuck, sink: RunSink) -> None:
    """Others may do better. What the engine has of it is aborted when its run is moved."""
    choice, when = stuck.choice, "first" if stuck.first else "next"
    metrics.STUCK.labels(when).inc()
    log.warning("sequence.stuck", sequence=choice.id, seconds=round(stuck.seconds, 1), waits_for=f"{when} token")
    message = f"the engine gave no {when} token for {stuck.seconds:.0f} s"
    sink.retry_elsewhere(choice.run, JobFault("engine_error", message, retriable=True))
