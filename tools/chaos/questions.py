"""Draws completion requests with known answers from a seed.

The simulator's answer is a pure function of the prompt, so the expected texts, finish reasons and token counts can be computed
here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headrace.broker.messages import Sampling
from headrace.tools.chaos.api_questions import ApiQuestion, draw_api_question
from headrace.workers.sim.answers.tokens import expected_text

# Token ids in this range exist in the bundled tokenizer and are no special tokens.
_FIRST_ID, _LAST_ID = 200, 3000
_SHARED_PREFIXES = 8
_PREFIX_TOKENS = 96
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Question:
    """A completion request. `cancel_after`: the client cancels once it has seen this many pieces of a stream."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    stream: bool
    choices: int = 1
    seed: int | None = None  # None = temperature 0
    stop: str | None = None
    cancel_after: int | None = None

    path = "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        """Return the request body."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "n": self.choices,
            "stream": self.stream,
            "ignore_eos": True,
            "temperature": 0 if self.seed is None else 1,
        }
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if self.seed is not None:
            body["seed"] = self.seed
        if self.stop is not None:
            body["stop"] = [self.stop]
        return body

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """Return the expected text of each choice."""
        return tuple(
            expected_text(self.prompt, self.max_tokens, stop=self._stops, sampling=self._sampling(n))
            for n in range(self.choices)
        )

    @cached_property
    def finishes(self) -> tuple[str, ...]:
        """Return the expected finish reason of each choice."""
        if self.stop is None:
            return ("length",) * self.choices
        whole = (expected_text(self.prompt, self.max_tokens, sampling=self._sampling(n)) for n in range(self.choices))
        return tuple("stop" if self.stop in text else "length" for text in whole)

    @property
    def completion_tokens(self) -> int | None:
        """Return the completion tokens of all choices together, or None with a stop string, where they are no product."""
        return None if self.stop is not None else self.choices * self.max_tokens

    @property
    def _stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,)

    def _sampling(self, choice: int) -> Sampling:
        if self.seed is None:
            return Sampling(temperature=0.0)
        return Sampling(temperature=1.0, seed=self.seed + choice)


def draw_questions(seed: int, *, longest: int = 250) -> Iterator[Question | ApiQuestion]:
    """Draw requests without end.

    Two thirds are streams. Some are cancelled on purpose, some have several choices, seeds, stop strings, long or very long
    prompts. About a third go through the other APIs (`headrace.tools.chaos.api_questions`). The same seed gives the same
    requests. `longest`: the most tokens of an answer; one answer in thirty may have four times as many.
    """
    rng = random.Random(f"questions {seed}")  # noqa: S311  # a load, not a secret
    prefixes = [[rng.randint(_FIRST_ID, _LAST_ID) for _ in range(_PREFIX_TOKENS)] for _ in range(_SHARED_PREFIXES)]
    number = 0
    while True:
        number += 1
        if rng.random() < 0.35:
            yield draw_api_question(number, rng)
            continue
        prefix = rng.choice(prefixes) if rng.random() < 0.5 else []
        own = rng.randint(4, 60) if rng.random() < 0.85 else rng.randint(200, 1500)
        prompt = (*prefix, *(rng.randint(_FIRST_ID, _LAST_ID) for _ in range(own)))
        question = Question(
            number=number,
            prompt=prompt,
            max_tokens=_length(rng, longest),
            stream=rng.random() < 0.67,
            choices=1 if rng.random() < 0.8 else rng.randint(2, 4),
            seed=rng.getrandbits(31) if rng.random() < 0.3 else None,
        )
        yield _with_twist(question, rng)


def _length(rng: random.Random, longest: int) -> int:
    kind = rng.random()
    if kind < 0.03:
        return 4 * longest
    return rng.randint(1, longest) if kind < 0.9 else rng.randint(1, 4)


def _with_twist(question: Question, rng: random.Random) -> Question:
    """Add a stop string that occurs in the answer, or a cancellation by the client, to some requests."""
    kind = rng.random()
    fields = {name: getattr(question, name) for name in question.__dataclass_fields__}
    if kind < 0.15:
        words = question.texts[0].split(" ")
        if len(words) >= 4:
            at = rng.randrange(1, len(words) - 2)
            stop = f" {words[at]} {words[at + 1]}"
            return Question(**{**fields, "stop": stop})
    elif kind < 0.3 and question.stream:
        return Question(**{**fields, "cancel_after": rng.randint(0, 20)})
    return question
