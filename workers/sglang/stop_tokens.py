"""Ends sequences at the stop tokens that SGLang does not look at.

With `ignore_eos` SGLang 0.5.23 leaves out all checks of tokens, those of the request's own `stop_token_ids` too.
"""

from __future__ import annotations

from headrace.broker.messages import Sampling
from headrace.workers.engine import Output


class StopTokens:
    """The stop tokens of one sequence, as far as SGLang does not heed them."""

    def __init__(self, sampling: Sampling) -> None:
        self._ids = frozenset(sampling.stop_token_ids if sampling.ignore_eos else ())
        self._least = sampling.min_tokens
        self._seen = 0

    def end(self, output: Output) -> bool:
        """Cut an output after the first stop token, if it has one from `min_tokens` on, and return whether it has."""
        if not self._ids:
            return False
        for place, token in enumerate(output.ids, start=1):
            if token in self._ids and self._seen + place >= self._least:
                del output.ids[place:]
                if output.logprobs is not None:
                    del output.logprobs[place:]
                output.finish, output.stop = "stop", token
                return True
        self._seen += len(output.ids)
        return False
