"""Draws chat, responses and messages requests with known answers: reasoning, tool calls, log-probabilities, patterns.

A request prescribes the simulator's answer (`sim_answer`), or has the simulator generate it from a pattern, which can be
computed here as well. The client must see the parsed form of that answer. The words are random, so that each piece of the
text occurs in one place only.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.broker.messages import Sampling
from headrace.workers.engine import Sequence
from headrace.workers.sim.answers.answers import answer_to
from headrace.workers.sim.answers.tokens import bundled_vocabulary

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
        """Return the expected finish reason, in the API's words."""
        if self.api == "messages":
            return "tool_use" if self.calls else "end_turn"
        if self.api == "responses":
            return "completed"
        return "tool_calls" if self.calls else "stop"

    def body(self, model: str) -> dict[str, Any]:
        """Return the request body."""
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
