"""Turns the token ids of an answer into text and cuts it at the stop string.

The text is a pure function of the id sequence: a pipeline through which a prefix of the ids is replayed is in exactly the state
of the first run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.workers.text.detokenize import detokenizer
from headrace.workers.text.stops import StopMatcher, StopStrings
from headrace.workers.text.tokens import TokenTable

__all__ = ["TextPipeline", "TokenTable"]


class TextPipeline:
    """Produces the text of a choice. Stop strings count only in the text after the first `min_tokens` tokens."""

    __slots__ = ("_detokenize", "_end", "_immune", "_stops")

    def __init__(
        self,
        table: TokenTable,
        *,
        prompt_ids: Sequence[int],
        stop: Sequence[str] | StopStrings = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        detokenize = detokenizer(table, prompt_ids=prompt_ids, skip_special_tokens=skip_special_tokens)
        self._detokenize = detokenize.push
        self._end = detokenize.finish
        wanted = isinstance(stop, StopStrings) or any(stop)
        self._stops = StopMatcher(stop, include_stop=include_stop) if wanted else None
        self._immune = min_tokens

    def push(self, token_id: int) -> str:
        """Return the text released by this token: no incomplete character, no possible beginning of a stop string."""
        text = self._detokenize(token_id)
        if self._stops is None:
            return text
        if self._immune > 0:
            self._immune -= 1
            return text
        return self._stops.push(text)

    @property
    def pusher(self) -> Callable[[int], str]:
        """Return `push`, or its inner function if there are no stop strings, for callers on the per-token path."""
        return self._detokenize if self._stops is None else self.push

    def last(self, token_id: int, *, hidden: bool) -> str:
        """Add the token with which the engine ended the answer; `hidden` if it is not part of the text."""
        return "" if hidden else self.push(token_id)

    def finish(self) -> str:
        """Return the held-back text, at the end of the answer. May still set `stopped`."""
        text = self._end()
        if self._stops is None:
            return text
        return self._stops.push(text) + self._stops.finish()

    @property
    def stopped(self) -> str | None:
        """Return the stop string that ended the text, if one did. No text is released after it."""
        return self._stops.stopped if self._stops is not None else None
