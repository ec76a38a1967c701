"""Draws completion requests with known answers from a seed.

The simulator's answer is a pure function of the prompt, so the expected texts, finish reasons and token counts can be computed
here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import Sequence
from headrace.workers.sim.answers import answer_to
from headrace.workers.sim.tokens import bundled_vocabulary, expected_text

# Draws chat, responses and messages requests with known answers: reasoning, tool calls, log-probabilities, patterns.
#
# A request prescribes the simulator's answer (`sim_answer`), or has the simulator generate it from a pattern, which can be
# computed here as well. The client must see the parsed form of that answer. The words are random, so that each piece of the
# text occurs in one place only.

Api = Literal["chat", "responses", "messages", "completions"]
PATHS: dict[Api, str] = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "completions": "/v1/completions",
}
PARSER_FLAGS = ("--tool-parser", "hermes", "--reasoning-parser", "think")
"""The parser flags that workers need to parse these answers."""

TOOL = "lookup"
_PARAMETERS = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string"}}},
    "required": ["names"],
}
_KINDS = (
    "chat",
    "logprobs",
    "reasoning",
    "tools",
    "responses",
    "responses tools",
    "messages",
    "messages tools",
    "pattern",
)
_MOST_TOKENS = 4000
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_FIRST_ID, _LAST_ID = 200, 3000


@dataclass(frozen=True)
class ApiQuestion:
    """A request with the expected parts of its answer: `content`, `reasoning`, and the arguments of each tool call in order."""

    number: int
    api: Api
    stream: bool
    asked: str
    says: str = ""
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, ...], ...] = ()
    logprobs: bool = False
    pattern: str = ""  # Completions only: the regular expression from which the simulator generates the answer.
    prompt: tuple[int, ...] = field(default=())
    cancel_after: int | None = None

    @property
    def path(self) -> str:
        return PATHS[self.api]

    @property
    def finish(self) -> str:
        if self.api == "messages":
            return "tool_use" if self.calls else "end_turn"
        if self.api == "responses":
            return "completed"
        return "tool_calls" if self.calls else "stop"

    def body(self, model: str) -> dict[str, Any]:
        body: dict[str, Any] = {"model": model, "stream": self.stream, "temperature": 0}
        if self.api == "completions":
            return {
                **body,
                "prompt": list(self.prompt),
                "max_tokens": _MOST_TOKENS,
                "structured_outputs": {"regex": self.pattern},
            }
        body["vllm_xargs"] = {"sim_answer": self.says}
        tool = {"name": TOOL, "description": "Looks names up"}
        if self.api == "responses":
            body |= {"input": self.asked, "max_output_tokens": _MOST_TOKENS, "store": False}
            if self.calls:
                body["tools"] = [{"type": "function", **tool, "parameters": _PARAMETERS}]
            return body
        body |= {"messages": [{"role": "user", "content": self.asked}], "max_tokens": _MOST_TOKENS}
        if self.api == "messages":
            if self.calls:
                body["tools"] = [{**tool, "input_schema": _PARAMETERS}]
            return body
        if self.calls:
            body["tools"] = [{"type": "function", "function": {**tool, "parameters": _PARAMETERS}}]
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": 2}
        return body


def draw_api_question(number: int, rng: random.Random) -> ApiQuestion:
    """Draw a request of any kind. Two thirds are streams; the client cancels a tenth of the streams."""
    kind = rng.choice(_KINDS)
    stream = rng.random() < 0.67
    leaves = rng.randint(0, 20) if stream and rng.random() < 0.1 else None
    if kind == "pattern":
        return _pattern_question(number, rng, stream=stream, cancel_after=leaves)
    api: Api = "responses" if "responses" in kind else "messages" if "messages" in kind else "chat"
    content, reasoning = _words(rng, rng.randint(3, 60)), ""
    calls: tuple[tuple[str, ...], ...] = ()
    if "tools" in kind:
        content, calls = "", tuple(tuple(_word(rng) for _ in range(rng.randint(1, 20))) for _ in range(rng.randint(1, 3)))
    if kind == "reasoning":
        reasoning = _words(rng, rng.randint(3, 40))
    says = "\n".join(
        f"<tool_call>\n{json.dumps({'name': TOOL, 'arguments': {'names': list(names)}})}\n</tool_call>" for names in calls
    )
    return ApiQuestion(
        number=number,
        api=api,
        stream=stream,
        asked=_words(rng, rng.randint(3, 30)),
        says=says or (f"<think>{reasoning}</think>{content}" if reasoning else content),
        content=content,
        reasoning=reasoning,
        calls=calls,
        logprobs=kind == "logprobs",
        cancel_after=leaves,
    )


def _pattern_question(number: int, rng: random.Random, *, stream: bool, cancel_after: int | None) -> ApiQuestion:
    prompt = tuple(rng.randint(_FIRST_ID, _LAST_ID) for _ in range(rng.randint(4, 60)))
    length = rng.randint(4, 120)
    pattern = f"[a-z]{{{length},{length + 20}}}"
    sampling = Sampling(temperature=0.0, max_tokens=_MOST_TOKENS)
    vocabulary = bundled_vocabulary()
    sequence = Sequence(id="q", token_ids=list(prompt), prompt_tokens=len(prompt), sampling=sampling, guided={"regex": pattern})
    answer = answer_to(sequence, vocabulary)
    content = b"".join(map(vocabulary.table.token_bytes, answer.ids[: answer.eos_at])).decode()
    return ApiQuestion(
        number=number,
        api="completions",
        stream=stream,
        asked="",
        content=content,
        pattern=pattern,
        prompt=prompt,
        cancel_after=cancel_after,
    )


def _word(rng: random.Random) -> str:
    return "".join(rng.choices(_LETTERS, k=rng.randint(3, 9)))


def _words(rng: random.Random, count: int) -> str:
    return " ".join(_word(rng) for _ in range(count))


# Token ids in this range exist in the bundled tokenizer and are no special tokens.
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
        return tuple(
            expected_text(self.prompt, self.max_tokens, stop=self._stops, sampling=self._sampling(n))
            for n in range(self.choices)
        )

    @cached_property
    def finishes(self) -> tuple[str, ...]:
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
    prompts. About a third go through the other APIs (`headrace.tools.chaos.questions`). The same seed gives the same
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
