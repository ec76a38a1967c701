"""Token budget of a prefill worker: limits the jobs it asks for by the tokens to compute, not by their number.

A worker with ten short prompts has computed them before another one has read half of a long prompt.  Messages do not tell their
size before they come, so the next one is guessed to be like the recent ones.  While there is room at least one is asked for,
because a prompt larger than the whole budget must be taken by some worker.
"""

from __future__ import annotations

RECENT = 0.2  # weight of a new job in the running mean
MOST_CREDIT = 16


class TokenBudget:
    """The tokens that a worker has still to compute. Beyond `limit` no more jobs are asked for."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a token budget must be 1 or more, got {limit}")
        self.limit = limit
        self.used = 0
        self._jobs: dict[str, int] = {}
        self._mean = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    def reserve(self, job: str, tokens: int) -> None:
        """Count a job that was taken, with the tokens that it will take to compute."""
        self.release(job)
        tokens = max(tokens, 1)
        self._jobs[job] = tokens
        self.used += tokens
        self._mean = tokens if not self._mean else (1 - RECENT) * self._mean + RECENT * tokens

    def release(self, job: str) -> None:
        """Stop counting a job that was computed or dropped. Fine when unknown."""
        self.used -= self._jobs.pop(job, 0)

    @property
    def credit(self) -> int:
        """The number of further jobs to ask for."""
        left = self.limit - self.used
        if left <= 0:
            return 0
        return max(1, min(MOST_CREDIT, int(left / self._mean))) if self._mean else 1
