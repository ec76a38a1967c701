"""Bounds what one generation request may ask of a worker beyond its prompt: strings, lists, schemas, tools, and their number.

The bytes of a request are bounded by the frontend already.  These bounds are for what costs more than its bytes: a stop string
becomes an automaton with a node per character, a schema a grammar, and the prompt counts once for each choice.  The frontend
checks before it stores a request, the worker again, because publishers on NATS need no frontend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.broker.errors import RequestOverLimit
from headrace.broker.messages import Generation

MOST_STOPS = 16  # OpenAI allows 4; a few more cost nothing
STOP_CHARS = 4096  # of all stop strings together
MOST_STOP_TOKENS = 1024
MOST_BAD_WORDS = 256
BAD_WORD_CHARS = 16 * 1024
MOST_BIASES = 4096
MOST_ALLOWED = 262_144  # about the largest vocabulary
GUIDED_BYTES = 256 * 1024  # of a schema, grammar or choices, encoded
REGEX_CHARS = 16 * 1024
MOST_TOOLS = 512  # OpenAI allows 128
TOOL_BYTES = 1024 * 1024  # of all tools, encoded
EXTRA_BYTES = 64 * 1024  # of parameters that are passed to the engine as they are, encoded
MOST_TOKENS = 8 * 1024 * 1024  # of the prompt, once per choice


def check_limits(generation: Generation, *, choices: int, prompt_tokens: int) -> None:
    """Check a request. Raises RequestOverLimit, which names the parameter, its size and the limit."""
    _check_strings(generation.stop, "stop", most=MOST_STOPS, chars=STOP_CHARS)
    if choices > 1:
        _check(choices * prompt_tokens, "n", MOST_TOKENS, "prompt tokens over all choices")
    sampling = generation.sampling
    if sampling.bad_words:
        _check_strings(sampling.bad_words, "bad_words", most=MOST_BAD_WORDS, chars=BAD_WORD_CHARS)
    if sampling.stop_token_ids:
        _check(len(sampling.stop_token_ids), "stop_token_ids", MOST_STOP_TOKENS, "ids")
    if sampling.logit_bias:
        _check(len(sampling.logit_bias), "logit_bias", MOST_BIASES, "entries")
    if sampling.allowed_token_ids:
        _check(len(sampling.allowed_token_ids), "allowed_token_ids", MOST_ALLOWED, "ids")
    if generation.guided is not None:
        _check_guided(generation.guided)
    if generation.extra:
        _check(_size(generation.extra), "vllm_xargs", EXTRA_BYTES, "bytes")
    parse = generation.parse
    if parse is not None:
        if parse.tools:
            _check(len(parse.tools), "tools", MOST_TOOLS, "tools")
            _check(_size(parse.tools), "tools", TOOL_BYTES, "bytes")
        if parse.template_kwargs:
            _check(_size(parse.template_kwargs), "chat_template_kwargs", EXTRA_BYTES, "bytes")


def _check_guided(guided: dict[str, Any]) -> None:
    regex = guided.get("regex")
    if isinstance(regex, str):
        _check(len(regex), "structured_outputs.regex", REGEX_CHARS, "characters")
    _check(_size(guided), "structured_outputs", GUIDED_BYTES, "bytes")


def _check_strings(values: Sequence[str], param: str, *, most: int, chars: int) -> None:
    if not values:
        return
    _check(len(values), param, most, "strings")
    _check(sum(map(len, values)), param, chars, "characters in all")


def _check(size: int, param: str, limit: int, what: str) -> None:
    if size > limit:
        raise RequestOverLimit(f"{param} has {size} {what}; the limit is {limit}", param=param)


def _size(value: Any) -> int:
    try:
        return len(msgspec.msgpack.encode(value))
    except (OverflowError, TypeError, RecursionError):  # refused with its own words where the request is encoded
        return 0
