"""How many prefill jobs a worker asks for: by the tokens it has to compute, not by their number.

A worker that is asked for ten short prompts is done with them before another one has read half of a long prompt.  Messages do
not tell their size before they come, so the next one is guessed to be like the recent ones, and while there is room at least
one is asked for: a prompt larger than the whole budget must be taken by somebody.
"""

from __future__ import annotations

RECENT = 0.2  # weight of a new job in the running mean
MOST_CREDIT = 16


class TokenBudget:
    """`limit`: tokens to be computed by what is taken, beyond which nothing more is asked for."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a token budget must be 1 or more, got {limit}")
        self.limit = limit
        self.used = 0
        self._jobs: dict[str, int] = {}
        self._mean = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    def take(self, job: str, tokens: int) -> None:
        """This job is here and will take so many tokens."""
        self.give_back(job)
        tokens = max(tokens, 1)
        self._jobs[job] = tokens
        self.used += tokens
        self._mean = tokens if not self._mean else (1 - RECENT) * self._mean + RECENT * tokens

    def give_back(self, job: str) -> None:
        """It is computed, or dropped. Fine when unknown."""
        self.used -= self._jobs.pop(job, 0)

    @property
    def credit(self) -> int:
        """How many more to ask for."""
        left = self.limit - self.used
        if left <= 0:
            return 0
        return max(1, min(MOST_CREDIT, int(left / self._mean))) if self._mean else 1
