"""Defines the frames that workers send to ingresses: rows of tokens, one frame per engine step and ingress."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.broker.messages.requests import Attempt, CallIndex, Choice, Count, Record, Run64, Seconds, Spill, Token, Tokens

FinishReason = Literal["stop", "length", "error", "tool_calls", "content_filter"]


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The log probability of a token: [id, token bytes, logprob, top, rank]; `top` is [[id, bytes, logprob], …], best first."""

    id: int
    token: bytes
    logprob: float
    top: list[tuple[int, bytes, float]] = []
    rank: int = 0  # rank of this token among all, 1 = the likeliest; for prompt tokens only, otherwise 0


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A piece of a parsed answer: [kind, text, index, id, name].

    `text` of kind `tool` is a piece of the arguments of call `index`; its first piece brings `id` and `name`.
    """

    kind: Literal["content", "reasoning", "tool"]
    text: str = ""
    index: CallIndex = 0
    id: str | None = None
    name: str | None = None


Text = str | list[Part]
"""The text that a token released: a string, or parts if the request asked for parsing. Never both in one answer."""


class JobFault(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reason why a job ended without a full answer. `code` is `headrace.broker.errors.JobError.code`."""

    code: str
    message: str
    retriable: bool = False
    retry_after_s: Seconds | None = None
    param: str | None = None


class Finish(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """The end of a choice. `tail` is text that was held back until it was clear to what it belongs."""

    reason: FinishReason
    stop: str | int | None = None  # the stop string or stop token that matched
    tail: Text = ""
    prompt_tokens: Tokens = 0
    completion_tokens: Tokens = 0
    cached_tokens: Tokens = 0
    reasoning_tokens: Tokens = 0  # of the completion tokens, as far as the parser can tell
    prompt_logprobs: list[TokenLogprob | None] | None = None  # one per prompt token, None for the first
    vector: bytes = b""  # result of pooling: a vector, f32 little endian, or a picture as the bytes of a file
    spill: Spill | None = None  # the place of a result that is too large for a frame
    fault: JobFault | None = None


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tokens of a choice from one engine step: [id, attempt, run, choice, offset, ids, texts, logprobs, fin].

    `offset` counts the tokens of this choice before `ids`; `texts` has one entry per id, empty while text is held back.
    """

    id: str
    attempt: Attempt
    run: Run64
    choice: Choice
    offset: Tokens
    ids: list[Count]
    texts: list[Text]
    logprobs: list[TokenLogprob] | None = None
    fin: Finish | None = None


class Frame(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The rows of an engine step of a worker for an ingress, on hr.out.<ingress>."""

    worker: Token
    rows: list[Row]
