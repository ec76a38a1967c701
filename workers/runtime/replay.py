"""What a resumed answer has said already, pushed through its pipeline once more, in silence and in slices.

A parser costs up to some tenths of a millisecond per token, and an answer may have tens of thousands of them.  These are slices
on the event loop rather than a thread: the parsers share tokenizers with everything else that runs here, and these are not made
for two threads at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

from headrace.workers.runtime.choice import ChoiceRun

INLINE_TOKENS = 64  # so few are replayed at once
SLICE_S = 0.003


def tokens_to_replay(choices: Sequence[ChoiceRun]) -> int:
    """How many tokens these choices have given out."""
    return sum(len(choice.run.choices[choice.choice].ids) for choice in choices)


def replay(choices: Sequence[ChoiceRun]) -> None:
    """All at once. Raises AnswerUnreadable."""
    for _ in _steps(choices):
        pass


async def replay_in_slices(choices: Sequence[ChoiceRun], *, clock: Callable[[], float] = time.monotonic) -> None:
    """The event loop gets a turn every few milliseconds. Raises AnswerUnreadable."""
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
