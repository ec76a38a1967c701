"""Chooses the batch runs that make way for interactive work on their worker. Sans-io.

The run that loses fewest computed tokens goes first, among those that were moved least often: a job is preempted again only
when every other one here has been preempted as often.  A job that was moved `most_moves` times stays where it is, so every
job gets on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from headrace.broker.protocol.resume import GENERATION
from headrace.broker.protocol.run import Run, RunState

PREEMPTIBLE = frozenset({RunState.WAITING, RunState.CLAIMING, RunState.RUNNING})


class Yielding(NamedTuple):
    """Runs that would make way, with the slots and, about, the KV blocks that they hold."""

    runs: int = 0
    slots: int = 0
    blocks: int = 0
    found: Sequence[Run] = ()


def moves_of(attempt: int) -> int:
    """Return how often a job was moved inside its generation: the first attempts are 1, 1000, 2000, …"""
    return attempt - 1 if attempt < GENERATION else attempt % GENERATION


def may_yield(run: Run, most_moves: int) -> bool:
    return run.batch and not run.kept and not run.suspect and run.state in PREEMPTIBLE and moves_of(run.attempt) < most_moves


def lost_tokens(run: Run) -> int:
    """Count the tokens that the next attempt has to compute again. Before its first token a run has computed little."""
    return run.envelope.tokens + sum(len(log.ids) for log in run.choices) if run.made else 0


def blocks_of(run: Run, block_size: int) -> int:
    """Estimate the KV blocks that a run holds; 0 if the size of a block is not known."""
    if not block_size:
        return 0
    if not run.choices:
        return -(-run.envelope.tokens // block_size)
    return sum(-(-(run.envelope.tokens + len(log.ids)) // block_size) for log in run.choices)


def choose(
    candidates: Iterable[Run], *, slots: int, blocks: int, block_size: int, resumable: Callable[[Run], bool]
) -> list[Run]:
    """Choose the runs to preempt so that so many slots and blocks become free, or all that there are.

    `candidates` make way for interactive work. One that no other worker could continue is left alone.
    """
    chosen = []
    for run in sorted(candidates, key=lambda run: (moves_of(run.attempt), lost_tokens(run))):
        if slots <= 0 and blocks <= 0:
            break
        if resumable(run):
            chosen.append(run)
            slots -= run.envelope.choices
            blocks -= blocks_of(run, block_size)
    return chosen
