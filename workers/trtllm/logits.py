"""Builds what changes a request's logits: a bias per token id, and logits processors that the operator has named."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.broker.messages import Sampling
from headrace.workers.engine import EngineConfig
from headrace.workers.errors import EngineStartFailed, RequestInvalid

PROCESSORS_ARG = "logits_processors"


def logit_bias(sampling: Sampling, vocab_size: int) -> NDArray[np.float32] | None:
    """Return the bias of every token id, None where there is none. Raises RequestInvalid for an id out of range.

    Only the ids of `allowed_token_ids` keep a finite one.
    """
    if not sampling.logit_bias and sampling.allowed_token_ids is None:
        return None
    for name, ids in (("logit_bias", sampling.logit_bias), ("allowed_token_ids", sampling.allowed_token_ids or ())):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestInvalid(f"{name} has token {token}; the vocabulary has {vocab_size}", param=name)
    if sampling.allowed_token_ids is None:
        bias = np.zeros(vocab_size, np.float32)
    else:
        bias = np.full(vocab_size, -np.inf, np.float32)
        bias[sampling.allowed_token_ids] = 0.0
    for token, value in sampling.logit_bias.items():
        bias[token] += value
    return bias


class LogitsProcessors:
    """The logits processors of an engine, by the name with which a request asks for one (`extra.logits_processors`)."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self._known = dict(known)

    @classmethod
    def of(cls, config: EngineConfig) -> LogitsProcessors:
        """Import the processors of the engine's settings, a map of names to `module:Class`. Raises EngineStartFailed."""
        given = config.args.get(PROCESSORS_ARG) or {}
        if not isinstance(given, Mapping):
            raise EngineStartFailed(
                f'{PROCESSORS_ARG} must be a map of names to classes, such as {{"calm": "mine:Calm"}}, got {given!r}'
            )
        known = {}
        for name, place in given.items():
            module, _, attribute = str(place).partition(":")
            try:
                made = getattr(importlib.import_module(module), attribute)
                known[str(name)] = made() if isinstance(made, type) else made
            except Exception as error:  # the operator's own code
                raise EngineStartFailed(
                    f"{PROCESSORS_ARG}: {name!r} cannot be made of {place!r}: {type(error).__name__}: {error}"
                ) from error
        return cls(known)

    def chosen(self, extra: Mapping[str, Any]) -> list[Any] | None:
        """Return the processors that a request asks for, in its order. Raises RequestInvalid for an unknown name."""
        wanted = extra.get(PROCESSORS_ARG)
        if wanted is None:
            return None
        if not isinstance(wanted, list):
            raise RequestInvalid(f"{PROCESSORS_ARG} must be a list of names, got {wanted!r}", param=PROCESSORS_ARG)
        for name in wanted:
            if name not in self._known:
                served = ", ".join(self._known) or "none"
                raise RequestInvalid(f"this worker has no logits processor {name!r}; it has: {served}", param=PROCESSORS_ARG)
        return [self._known[name] for name in wanted] or None
