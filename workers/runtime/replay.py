"""Replays the emitted tokens of a resumed answer through its pipeline, without output and in time slices.

A parser takes up to some tenths of a millisecond per token, and an answer may have tens of thousands of tokens. The slices run
on the event loop rather than in a thread, because the parsers share tokenizers with the rest of the process, and tokenizers are
not safe for two threads at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

from headrace.workers.runtime.choice import ChoiceRun

INLINE_TOKENS = 64  # so few tokens are replayed without slices
SLICE_S = 0.003


def tokens_to_replay(choices: Sequence[ChoiceRun]) -> int:
    """Return the number of tokens that these choices have emitted."""
    return sum(len(choice.run.choices[choice.choice].ids) for choice in choices)


def replay(choices: Sequence[ChoiceRun]) -> None:
    """Replay all tokens at once. Raises AnswerUnreadable."""
    for _ in _steps(choices):
        pass


async def replay_in_slices(choices: Sequence[ChoiceRun], *, clock: Callable[[], float] = time.monotonic) -> None:
    """Replay all tokens, yielding to the event loop every few milliseconds. Raises AnswerUnreadable."""
    until = clock() + SLICE_S
    for _ in _steps(choices):
        if clock() >= until:
            await asyncio.sleep(0)
            until = clock() + SLICE_S


def _steps(choices: Sequence[ChoiceRun]) -> Iterator[None]:
    for choice in choices:
        push = choice.pipeline.push
        for token in list(choice.run.choices[choice.choice].ids):
            push(token)
            yield
