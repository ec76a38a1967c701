"""Checks that the log-probabilities of a prompt fit into the message with the end of the answer, and refuses them otherwise.

The size is checked twice: before the computation, by the least size of the result, and on the result itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.broker.codec import encode
from headrace.broker.messages import TokenLogprob
from headrace.workers.errors import RequestInvalid

PARAM = "prompt_logprobs"
_LEAST_TOKEN = 16  # bytes of a token with its number, bytes, log-probability and rank
_LEAST_ALTERNATIVE = 14  # bytes of an alternative


def check_size(tokens: int, alternatives: int, *, most_bytes: int) -> None:
    """Check that the result for `tokens` prompt tokens can fit into `most_bytes`. Raises RequestInvalid if it cannot."""
    least = (tokens - 1) * (_LEAST_TOKEN + alternatives * _LEAST_ALTERNATIVE)
    if least > most_bytes:
        raise RequestInvalid(
            f"prompt_logprobs={alternatives} of {tokens} prompt tokens take {least} bytes at least; a message has {most_bytes}",
            param=PARAM,
        )


def fitting(items: Sequence[TokenLogprob | None], *, prompt_tokens: int, most_bytes: int) -> list[TokenLogprob | None]:
    """Return the items of the prompt alone: a resumed run's emitted tokens count as prompt. Raises RequestInvalid."""
    mine = list(items[:prompt_tokens])
    size = len(encode(mine))
    if size > most_bytes:
        raise RequestInvalid(
            f"prompt_logprobs of {prompt_tokens} prompt tokens take {size} bytes; one message has {most_bytes}", param=PARAM
        )
    return mine
