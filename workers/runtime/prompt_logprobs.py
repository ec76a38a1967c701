"""Log-probabilities of the prompt leave in one message, with the end of the answer: what does not fit is refused, by name.

Asked twice: before anything is computed, by the least that the result can take, and of the result itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.broker.codec import encode
from headrace.broker.messages import TokenLogprob
from headrace.workers.errors import RequestInvalid

PARAM = "prompt_logprobs"
_LEAST_TOKEN = 16  # bytes of one token with its number, bytes, log-probability and rank …
_LEAST_ALTERNATIVE = 14  # … and of one alternative


def check_size(tokens: int, alternatives: int, *, most_bytes: int) -> None:
    """Raises RequestInvalid when the result for so many prompt tokens cannot fit into `most_bytes`."""
    least = (tokens - 1) * (_LEAST_TOKEN + alternatives * _LEAST_ALTERNATIVE)
    if least > most_bytes:
        raise RequestInvalid(
            f"prompt_logprobs={alternatives} of {tokens} prompt tokens take {least} bytes at least; a message has {most_bytes}",
            param=PARAM,
        )


def fitting(items: Sequence[TokenLogprob | None], *, prompt_tokens: int, most_bytes: int) -> list[TokenLogprob | None]:
    """Those of the prompt alone: after a resume the engine counts emitted tokens as prompt. Raises RequestInvalid."""
    mine = list(items[:prompt_tokens])
    size = len(encode(mine))
    if size > most_bytes:
        raise RequestInvalid(
            f"prompt_logprobs of {prompt_tokens} prompt tokens take {size} bytes; one message has {most_bytes}", param=PARAM
        )
    return mine
