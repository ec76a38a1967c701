"""Detects stuck sequences: accepted by a running engine but receiving no tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import structlog

from headrace.broker.log_ids import log_ids
from headrace.broker.messages import JobFault
from headrace.broker.worker.ports import RunSink
from headrace.workers import metrics
from headrace.workers.runtime.choice import ChoiceRun

log = structlog.get_logger()


class Stuck(NamedTuple):
    """A stuck sequence. `seconds`: the time since its last token, or since its start."""

    choice: ChoiceRun
    seconds: float
    first: bool  # whether the sequence has no token at all


class StuckSequences:
    """Detects stuck sequences. Checked about once a second, so that the token path has no part in it."""

    def __init__(self, *, first_token_s: float, token_s: float) -> None:
        """Set the longest wait in seconds for the first token of a sequence, and for each token after it."""
        self._first_token_s = first_token_s
        self._token_s = token_s
        self._seen: dict[str, tuple[int, float]] = {}  # tokens it had, and since when it has no more

    def forget(self) -> None:
        """Count all waits anew from the next check on."""
        self._seen = {}

    def check(self, now_s: float, active: Iterable[ChoiceRun]) -> list[Stuck]:
        """Return the sequences that have waited for too long. Sequences that are not active any more are forgotten."""
        seen, self._seen, stuck = self._seen, {}, []
        for choice in active:
            tokens = len(choice.run.choices[choice.choice].ids)
            before = seen.get(choice.id)
            since_s = now_s if before is None or before[0] != tokens else before[1]
            self._seen[choice.id] = tokens, since_s
            if choice.first_token is not None and not choice.first_token.done():
                continue  # A hand-over has a time limit of its own.
            first = not choice.first_s
            if now_s - since_s > (self._first_token_s if first else self._token_s):
                stuck.append(Stuck(choice, now_s - since_s, first))
        return stuck


def give_up(stuck: Stuck, sink: RunSink) -> None:
    """Move the run of a stuck sequence to another worker, which aborts its sequences in this engine."""
    choice, when = stuck.choice, "first" if stuck.first else "next"
    metrics.STUCK.labels(when).inc()
    ids = log_ids(choice.run.envelope)
    log.warning("sequence.stuck", **ids, sequence=choice.id, seconds=round(stuck.seconds, 1), waits_for=f"{when} token")
    message = f"the engine gave no {when} token for {stuck.seconds:.0f} s"
    sink.retry_elsewhere(choice.run, JobFault("engine_error", message, retriable=True))
