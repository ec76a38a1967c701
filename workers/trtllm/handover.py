"""Translates a hand-over to and from TensorRT-LLM's `DisaggregatedParams`: a context-only request, then a generation-only one.

The context side returns an opaque state, with which the generation side fetches the blocks, and the token that it has sampled.
The generation side begins behind that token and returns it as its first. So the context side samples as the request asks
(`EngineInfo.prefill_samples`), and its log probability travels beside the state. Where that does not do (a grammar, a seed that
must give the same answer as on one engine, a least length), the prompt is computed on the generation side instead.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from headrace.broker.messages import TokenLogprob
from headrace.workers.engine import Sequence
from headrace.workers.errors import TransferFailed

ENGINE_KEY = "trtllm"
STATE = "opaque_state"
FIRST_LOGPROBS = "first_logprobs"  # ours: [[token, logprob, [[token, logprob], …]], …]
_NEEDED: dict[str, type] = {"ctx_request_id": int, "first_gen_tokens": list, STATE: str}
_CARRIED = (
    "ctx_request_id",
    "first_gen_tokens",
    STATE,
    "draft_tokens",
    # 1.3:
    "disagg_request_id",
    "ctx_dp_rank",
    "ctx_info_endpoint",
)


def plain(params: Any) -> dict[str, Any]:
    """Return the parameters of the context side as numbers, texts and lists."""
    carried: dict[str, Any] = {"engine": ENGINE_KEY}
    for name in _CARRIED:
        value = getattr(params, name, None)
        if value is not None:
            carried[name] = base64.b64encode(value).decode() if isinstance(value, bytes) else value
    return carried


def first_tokens(params: Mapping[str, Any] | None) -> list[int]:
    """Return the tokens that the context side has sampled. Raises TransferFailed for parameters that cannot be used."""
    return list(_checked(params)["first_gen_tokens"])


def generation_params(api: Any, params: Mapping[str, Any] | None) -> Any:
    """Return the `DisaggregatedParams` of the generation side. Raises TransferFailed for parameters that cannot be used."""
    given = _checked(params)
    known = {field.name for field in dataclasses.fields(api.DisaggregatedParams)}
    values = {name: given[name] for name in _CARRIED if name in given and name in known}
    try:
        values[STATE] = base64.b64decode(given[STATE], validate=True)
    except (binascii.Error, ValueError):
        raise TransferFailed(f"{STATE} is not base64 in the parameters of the prefill side") from None
    return api.DisaggregatedParams(request_type="generation_only", **values)


def context_params(api: Any, media: Mapping[str, Any] | None = None) -> Any:
    """Return the `DisaggregatedParams` of the context side. `media`: what an encoder has handed over (`encoder.py`)."""
    return api.DisaggregatedParams(request_type="context_only", **(media or {}))


def plain_logprobs(logprobs: Seq[TokenLogprob]) -> list[list[Any]]:
    """Return the log probabilities of the first tokens without their bytes, which the other side knows too."""
    return [[one.id, one.logprob, [[token, logprob] for token, _, logprob in one.top]] for one in logprobs]


def first_logprobs(params: Mapping[str, Any] | None, token_bytes: Callable[[int], bytes]) -> list[TokenLogprob] | None:
    """Return the log probabilities of the first tokens, None where they did not come or cannot be read."""
    try:
        return [
            TokenLogprob(
                int(token),
                token_bytes(int(token)),
                float(own),
                [(int(one), token_bytes(int(one)), float(at)) for one, at in top],
            )
            for token, own, top in (params or {})[FIRST_LOGPROBS]
        ]
    except (KeyError, TypeError, ValueError, IndexError):
        return None


def needs_own_first_token(sequence: Sequence, params: Mapping[str, Any] | None) -> str | None:
    """Return why the first token of a sequence cannot be the context side's, or None."""
    if sequence.guided:
        return "guided"
    if sequence.logprobs is not None and FIRST_LOGPROBS not in (params or {}):
        return "logprobs"
    if sequence.sampling.seed is not None and sequence.sampling.temperature > 0:
        return "seed"
    if sequence.sampling.min_tokens > 0:
        return "min_tokens"
    return None


def _checked(params: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if params is None:
        raise TransferFailed("a hand-over without parameters")
    if params.get("engine") != ENGINE_KEY:
        raise TransferFailed(f"the parameters are those of another engine ({params.get('engine')!r})")
    for name, kind in _NEEDED.items():
        if not isinstance(params.get(name), kind):
            raise TransferFailed(f"{name} is {params.get(name)!r} in the parameters of the prefill side")
    tokens = params["first_gen_tokens"]
    if not tokens or not all(isinstance(token, int) for token in tokens):
        raise TransferFailed(f"first_gen_tokens is {tokens!r} in the parameters of the prefill side")
    return params
