"""The text pipeline of one answer: ids → characters → up to the stop string.

A pure function of the id sequence: whoever replays a prefix of it, silently, stands exactly where the first run stood.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.workers.text.detokenize import detokenizer
from headrace.workers.text.stops import StopMatcher
from headrace.workers.text.tokens import TokenTable

__all__ = ["TextPipeline", "TokenTable"]


class TextPipeline:
    """Text of one choice. Stop strings count only in the text after the first `min_tokens` tokens."""

    __slots__ = ("_detokenize", "_end", "_immune", "_stops")

    def __init__(
        self,
        table: TokenTable,
        *,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        detokenize = detokenizer(table, prompt_ids=prompt_ids, skip_special_tokens=skip_special_tokens)
        self._detokenize = detokenize.push
        self._end = detokenize.finish
        self._stops = StopMatcher(stop, include_stop=include_stop) if any(stop) else None
        self._immune = min_tokens

    def push(self, token_id: int) -> str:
        """The text released by this token: never half a character, never part of what may become a stop string."""
        text = self._detokenize(token_id)
        if self._stops is None:
            return text
        if self._immune > 0:
            self._immune -= 1
            return text
        return self._stops.push(text)

    @property
    def pusher(self) -> Callable[[int], str]:
        """`push`, or what it comes down to where no stop string is looked for: for who calls it once per token."""
        return self._detokenize if self._stops is None else self.push

    def last(self, token_id: int, *, hidden: bool) -> str:
        """The engine ended the answer with this token; `hidden` if it is no part of the text."""
        return "" if hidden else self.push(token_id)

    def finish(self) -> str:
        """The text held back, at the end of the answer. May still set `stopped`."""
        text = self._end()
        if self._stops is None:
            return text
        return self._stops.push(text) + self._stops.finish()

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text; from then on nothing more comes out."""
        return self._stops.stopped if self._stops is not None else None
