"""Counts the tokens of an answer."""

from __future__ import annotations

from headrace.broker.messages import Finish
from headrace.frontend.schema.answers import UNSET, CachedTokens, CompletionTokens, Usage


class UsageCounter:
    """The tokens of a request over all its prompts and choices."""

    __slots__ = ("_cached", "_prompts", "_share", "completion", "reasoning")

    def __init__(self, prompt_tokens: list[int], choices: int, *, reasoning: bool = False) -> None:
        """`prompt_tokens` has the tokens per prompt, `choices` the choices per prompt. `reasoning`: count reasoning tokens."""
        self._prompts = prompt_tokens
        self._share = choices
        self.completion = 0
        self.reasoning: int | None = 0 if reasoning else None
        self._cached: list[int | None] = [None] * len(prompt_tokens)

    def fresh(self) -> UsageCounter:
        """Return a counter of the same prompts that has counted nothing."""
        return UsageCounter(list(self._prompts), self._share, reasoning=self.reasoning is not None)

    def end(self, choice: int, fin: Finish) -> None:
        """Count the end of a choice. Of the cached tokens of a prompt's choices the minimum counts.

        The choices of a prompt find each other's blocks in the cache, so only the minimum was cached before the request.
        """
        prompt = choice // self._share
        self._prompts[prompt] = max(self._prompts[prompt], fin.prompt_tokens)  # media may have more
        known = self._cached[prompt]
        self._cached[prompt] = fin.cached_tokens if known is None else min(known, fin.cached_tokens)
        if self.reasoning is not None:
            self.reasoning += fin.reasoning_tokens

    @property
    def ended(self) -> bool:
        """Return True if a choice has ended."""
        return any(c is not None for c in self._cached)

    @property
    def prompt(self) -> int:
        """Return the tokens of all prompts."""
        return sum(self._prompts)

    @property
    def cached(self) -> int:
        """Return the prompt tokens that were found in a cache."""
        return sum(c for c in self._cached if c)

    def usage(self) -> Usage:
        """Return the counts in OpenAI's form."""
        prompt = self.prompt
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self.completion,
            total_tokens=prompt + self.completion,
            prompt_tokens_details=CachedTokens(self.cached),
            completion_tokens_details=CompletionTokens(self.reasoning) if self.reasoning is not None else UNSET,
        )
