"""Questions of the other APIs: chats, responses and messages, with reasoning, tool calls, log-probabilities, patterns.

The simulator is told the words of its answer (`sim_answer`), or makes them from a pattern, which can be computed here; what a
client must see is what a parser makes of them.  The words are random, so that a piece of them stands in one place only.
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
"""What workers need to take these answers apart."""

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
    """One request, and the parts of its answer: `content`, `reasoning`, and the arguments of each tool call in order."""

    number: int
    api: Api
    stream: bool
    asked: str
    says: str = ""
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, ...], ...] = ()
    logprobs: bool = False
    pattern: str = ""  # completions: what the answer must look like, made by the simulator itself
    prompt: tuple[int, ...] = field(default=())
    cancel_after: int | None = None

    @property
    def path(self) -> str:
        return PATHS[self.api]

    @property
    def finish(self) -> str:
        """As the API calls it."""
        if self.api == "messages":
            return "tool_use" if self.calls else "end_turn"
        if self.api == "responses":
            return "completed"
        return "tool_calls" if self.calls else "stop"

    def body(self, model: str) -> dict[str, Any]:
        """The request."""
        told: dict[str, Any] = {"model": model, "stream": self.stream, "temperature": 0}
        if self.api == "completions":
            return {
                **told,
                "prompt": list(self.prompt),
                "max_tokens": _MOST_TOKENS,
                "structured_outputs": {"regex": self.pattern},
            }
        told["vllm_xargs"] = {"sim_answer": self.says}
        tool = {"name": TOOL, "description": "Looks names up"}
        if self.api == "responses":
            told |= {"input": self.asked, "max_output_tokens": _MOST_TOKENS, "store": False}
            if self.calls:
                told["tools"] = [{"type": "function", **tool, "parameters": _PARAMETERS}]
            return told
        told |= {"messages": [{"role": "user", "content": self.asked}], "max_tokens": _MOST_TOKENS}
        if self.api == "messages":
            if self.calls:
                told["tools"] = [{**tool, "input_schema": _PARAMETERS}]
            return told
        if self.calls:
            told["tools"] = [{"type": "function", "function": {**tool, "parameters": _PARAMETERS}}]
        if self.logprobs:
            told |= {"logprobs": True, "top_logprobs": 2}
        return told


def draw_spoken(number: int, rng: random.Random) -> ApiQuestion:
    """One of any kind, two thirds of them streams, some of which their client leaves."""
    kind = rng.choice(_KINDS)
    stream = rng.random() < 0.67
    leaves = rng.randint(0, 20) if stream and rng.random() < 0.1 else None
    if kind == "pattern":
        return _patterned(number, rng, stream=stream, cancel_after=leaves)
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


def _patterned(number: int, rng: random.Random, *, stream: bool, cancel_after: int | None) -> ApiQuestion:
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
