"""Counting the tokens of one answer."""

from __future__ import annotations

from headrace.broker.messages import Finish
from headrace.frontend.schema.answers import UNSET, CachedTokens, CompletionTokens, Usage


class UsageCounter:
    """Tokens of one request over all its prompts and choices."""

    __slots__ = ("_cached", "_prompts", "_share", "completion", "reasoning")

    def __init__(self, prompt_tokens: list[int], choices: int, *, reasoning: bool = False) -> None:
        """`prompt_tokens` per prompt, each answered `choices` times. `reasoning`: count what was only thought as well."""
        self._prompts = prompt_tokens
        self._share = choices
        self.completion = 0
        self.reasoning: int | None = 0 if reasoning else None
        self._cached: list[int | None] = [None] * len(prompt_tokens)

    def end(self, choice: int, fin: Finish) -> None:
        """The end of a choice. Siblings find each other's blocks in the cache, so the least says what was there before."""
        prompt = choice // self._share
        self._prompts[prompt] = max(self._prompts[prompt], fin.prompt_tokens)  # only the engine may know what media take
        known = self._cached[prompt]
        self._cached[prompt] = fin.cached_tokens if known is None else min(known, fin.cached_tokens)
        if self.reasoning is not None:
            self.reasoning += fin.reasoning_tokens

    @property
    def ended(self) -> bool:
        """Some choice has ended."""
        return any(c is not None for c in self._cached)

    @property
    def prompt(self) -> int:
        return sum(self._prompts)

    @property
    def cached(self) -> int:
        return sum(c for c in self._cached if c)

    def usage(self) -> Usage:
        prompt = self.prompt
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self.completion,
            total_tokens=prompt + self.completion,
            prompt_tokens_details=CachedTokens(self.cached),
            completion_tokens_details=CompletionTokens(self.reasoning) if self.reasoning is not None else UNSET,
        )
