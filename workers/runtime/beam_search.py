"""Searches for the likeliest answers, sans-io: which beams to extend by a token, and which answers are the best so far.

Every step extends each open beam by each of the candidates that the engine reports for its next token. An end token ends a
beam; of the others the `width` likeliest are the open beams of the next step. At the end all beams, ended or open, are ranked
by score: the sum of the log-probabilities over the length (prompt included, end token not) to the power `length_penalty`.

The search ends early when no open beam can still get among the best. That changes nothing in the result, because
log-probabilities are never above 0.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from headrace.broker.messages import TokenLogprob


@dataclass(frozen=True, slots=True)
class Beam:
    """A beginning of an answer, or a whole one. `end` is its end token, which is in `ids` only if it shall be part of them."""

    ids: list[int] = field(default_factory=list)
    total: float = 0.0  # sum of the log-probabilities, with that of the end token
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per id, if they are wanted
    end: int | None = None


class BeamSearch:
    """Holds the beams of a search. `open` are those that the next step extends, the likeliest first."""

    def __init__(
        self,
        *,
        width: int,
        prompt_tokens: int,
        max_tokens: int,
        end_ids: Collection[int],
        length_penalty: float = 1.0,
        keep_end: bool = False,
        alternatives: int | None = None,
    ) -> None:
        """Begin with an empty beam.

        `keep_end`: the end token is part of an answer. `alternatives` per token of an answer; None = no log-probabilities.
        """
        self.width = width
        self.open = [Beam()]
        self.steps = 0
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._end_ids = frozenset(end_ids)
        self._length_penalty = length_penalty
        self._keep_end = keep_end
        self._alternatives = alternatives
        self._ended: list[tuple[float, Beam]] = []  # the best `width`, by score; of equal ones the earlier is first

    @property
    def candidates(self) -> int:
        """Return the number of candidates that a step needs: enough for `width` beams to go on if a candidate each ends."""
        return 2 * self.width

    @property
    def done(self) -> bool:
        """Return whether further steps would change nothing."""
        if not self.open or self.steps >= self._max_tokens:
            return True
        return len(self._ended) == self.width and self._ended[-1][0] >= self._best_possible(self.open[0])

    def advance(self, reported: Sequence[TokenLogprob]) -> None:
        """Extend each open beam by the candidates in `top` of its entry in `reported`."""
        extended: list[tuple[float, Beam, tuple[int, bytes, float], TokenLogprob]] = []
        for beam, step in zip(self.open, reported, strict=True):
            for candidate in step.top:
                total = beam.total + candidate[2]
                if candidate[0] in self._end_ids:
                    self._end(beam, total, candidate, step)
                else:
                    extended.append((total, beam, candidate, step))
        self.steps += 1
        extended.sort(key=lambda found: -found[0])
        self.open = [
            Beam([*beam.ids, candidate[0]], total, self._logprobs(beam, candidate, step))
            for total, beam, candidate, step in extended[: self.width]
        ]

    def best(self) -> list[Beam]:
        """Return the `width` best beams, the best first."""
        ranked = self._ended + [(self._score(beam.total, len(beam.ids)), beam) for beam in self.open]
        return [beam for _, beam in sorted(ranked, key=lambda scored: -scored[0])[: self.width]]

    def _end(self, beam: Beam, total: float, candidate: tuple[int, bytes, float], step: TokenLogprob) -> None:
        token = candidate[0]
        if self._keep_end:
            ended = Beam([*beam.ids, token], total, self._logprobs(beam, candidate, step), token)
        else:
            ended = Beam(beam.ids, total, beam.logprobs, token)
        insort(self._ended, (self._score(total, len(beam.ids)), ended), key=lambda scored: -scored[0])
        del self._ended[self.width :]

    def _logprobs(self, beam: Beam, candidate: tuple[int, bytes, float], step: TokenLogprob) -> list[TokenLogprob]:
        if self._alternatives is None:
            return []
        return [*beam.logprobs, TokenLogprob(*candidate, step.top[: self._alternatives])]

    def _score(self, total: float, tokens: int) -> float:
        return float(total / (self._prompt_tokens + tokens) ** self._length_penalty)

    def _best_possible(self, beam: Beam) -> float:
        """Return the score of a beam that gains no more uncertainty and ends at the length that suits it best."""
        return max(self._score(beam.total, len(beam.ids)), self._score(beam.total, self._max_tokens))
