"""Converts `Sequence` to TensorRT-LLM's `SamplingParams`, and what it has given so far to `Output`.

TensorRT-LLM's results grow: `token_ids` and `logprobs` hold everything since the start, and what is new is cut off here.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from headrace.broker.messages.frames import TokenLogprob
from headrace.workers.engine import Fault, Output, Sequence
from headrace.workers.errors import RequestInvalid, TransferFailed, UnsupportedByEngine
from headrace.workers.kit import GUIDED
from headrace.workers.trtllm.settings import LogitsProcessors, logit_bias

# Translates a hand-over to and from TensorRT-LLM's `DisaggregatedParams`: a context-only request, then a generation-only one.
#
# The context side returns an opaque state, with which the generation side fetches the blocks, and the token that it has
# sampled. The generation side begins behind that token and returns it as its first. So the context side samples as the
# request asks (`EngineInfo.prefill_samples`), and its log probability travels beside the state. Where that does not do (a
# grammar, a seed that must give the same answer as on one engine, a least length), the prompt is computed on the generation
# side instead.

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


def context_params(api: Any) -> Any:
    """Return the `DisaggregatedParams` of the context side."""
    return api.DisaggregatedParams(request_type="context_only")


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


LOGITS = ("return_context_logits", "return_generation_logits")
RANK, RELAX = "attention_dp_rank", "attention_dp_relax"
UNKNOWN_LOGPROB = -9999.0  # of an end token that the engine has not listed

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The facts of a started engine that conversion needs."""

    api: Any
    eos: tuple[int, ...]
    vocab_size: int
    token_bytes: TokenBytes
    processors: LogitsProcessors = field(default_factory=lambda: LogitsProcessors({}))
    ranks: int = 1  # attention data-parallel ranks
    priority: bool = False


@dataclass(slots=True)
class ReadProgress:
    """The position up to which a result has been read. `first`: tokens that the context side of a hand-over has sampled."""

    sequence: Sequence
    first: list[int] = field(default_factory=list)
    first_logprobs: list[TokenLogprob] | None = None
    seen: int = 0  # tokens of the result that were read
    started: bool = False


def to_sampling_params(sequence: Sequence, model: Model) -> Any:
    """Build TensorRT-LLM's `SamplingParams`. Raises RequestInvalid or UnsupportedByEngine."""
    api, sampling = model.api, sequence.sampling
    prefill = _is_prefill(sequence)
    end = model.eos[0] if model.eos else -1
    values: dict[str, Any] = {
        "max_tokens": 1 if prefill else sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": max(0, sampling.top_k),
        "seed": sampling.seed,
        "ignore_eos": prefill or sampling.ignore_eos,
        "include_stop_str_in_output": True,  # the token that stops is the last one of an answer
        "detokenize": False,
        "logprobs": None if sequence.logprobs is None else max(1, sequence.logprobs),  # 0 counts as none
        "embedding_bias": logit_bias(sampling, model.vocab_size),
        "logits_processor": model.processors.chosen(sequence.extra),
    }
    if sampling.top_p < 1.0:
        values["top_p"] = sampling.top_p
    for name, neutral in (("min_p", 0.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0), ("repetition_penalty", 1.0)):
        if (value := getattr(sampling, name)) != neutral:
            values[name] = value
    if sampling.bad_words:
        values["bad"] = list(sampling.bad_words)  # the engine's tokenizer reads them only if it sets the end token too
    else:
        values |= {"end_id": end, "pad_id": end}
    if not prefill:
        stops = [*sampling.stop_token_ids, *([] if sampling.ignore_eos else model.eos[1:])]
        values |= {
            "min_tokens": sampling.min_tokens or None,
            "stop_token_ids": list(dict.fromkeys(stops)) or None,
            "guided_decoding": _guided(sequence.guided, api),
        }
        values |= {name: True for name in LOGITS if sequence.extra.get(name)}
    try:
        return api.SamplingParams(**values)
    except (TypeError, ValueError) as error:
        raise RequestInvalid(str(error)) from error


def _guided(guided: Mapping[str, Any] | None, api: Any) -> Any:
    """Return TensorRT-LLM's form of structured output. It has every kind except a choice."""
    if guided is None:
        return None
    kinds = [name for name in guided if name in GUIDED and guided[name] not in (None, False)]
    for name in guided:
        if name not in GUIDED:
            raise RequestInvalid(f"unknown kind of structured output {name!r}; known: {', '.join(sorted(GUIDED))}", param=name)
    if len(kinds) != 1:
        raise RequestInvalid(f"structured output takes one kind, not {', '.join(kinds) or 'none'}", param="guided")
    kind, value = kinds[0], guided[kinds[0]]
    if kind == "choice":
        kind, value = "grammar", "root ::= " + " | ".join(json.dumps(str(one), ensure_ascii=False) for one in value)
    if kind == "structural_tag" and not isinstance(value, str):
        value = json.dumps(value)
    return api.GuidedDecodingParams(**{kind: value})


def scheduling_of(sequence: Sequence, model: Model) -> dict[str, Any] | None:
    """Return the fields of TensorRT-LLM's `SchedulingParams`, None without a wish. Raises RequestInvalid for a bad rank."""
    rank = sequence.extra.get(RANK)
    if rank is None:
        return None if sequence.rank is None else {RANK: sequence.rank, RELAX: False}
    if model.ranks == 1:
        raise UnsupportedByEngine("this TensorRT-LLM was started without enable_attention_dp", param=RANK)
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < model.ranks:
        raise RequestInvalid(f"{RANK} is {rank!r}; this worker has ranks 0 to {model.ranks - 1}", param=RANK)
    return {RANK: rank, RELAX: bool(sequence.extra.get(RELAX, True))}


def to_priority(priority: int) -> float:
    """Return TensorRT-LLM's priority, between 0 and 1, highest first; ours is lowest first."""
    return 0.5 - math.atan(priority / 100) / math.pi


def to_output(progress: ReadProgress, result: Any, model: Model) -> Output | None:
    """Convert what is new in a result, None if that is nothing."""
    sequence, completion = progress.sequence, result.outputs[0]
    output = Output(sequence.id, list(completion.token_ids or ())[progress.seen :])
    positions = list(completion.logprobs or ())[progress.seen :]
    progress.seen += len(output.ids)
    first = not progress.started
    reason = completion.finish_reason
    if not output.ids and reason is None:
        return None
    if first:
        progress.started = True
        output.cached_tokens = int(getattr(result, "cached_tokens", 0) or 0)
        if progress.first:
            output.cached_tokens = 0  # what was fetched is not the cache's
            if output.ids[: len(progress.first)] != progress.first:
                output.ids[:0] = progress.first
                positions[:0] = [None] * len(progress.first)
    if reason is not None and not _is_prefill(sequence):
        _finish(output, progress, completion, model, first=first)
    if sequence.logprobs is not None and output.ids:
        output.logprobs = to_logprobs(output.ids, positions, sequence.logprobs, model.token_bytes)
        if first and progress.first_logprobs is not None:
            output.logprobs[: len(progress.first_logprobs)] = progress.first_logprobs
    if _is_prefill(sequence):
        return _prefilled(output, completion)
    if reason is not None:
        output.extra = _logits(sequence, completion, result)
    return output


def _is_prefill(sequence: Sequence) -> bool:
    return sequence.handover is not None and sequence.handover.kind == "prefill"


def _finish(output: Output, progress: ReadProgress, completion: Any, model: Model, *, first: bool) -> None:
    sequence, reason = progress.sequence, completion.finish_reason
    if reason == "length":
        output.finish = "length"
    elif reason == "stop":
        output.finish = "stop"
        stop = completion.stop_reason
        last = output.ids[-1] if output.ids else None
        if isinstance(stop, int):
            if last != stop:
                output.ids.append(stop)
            if stop not in model.eos or stop in sequence.sampling.stop_token_ids:
                output.stop = stop
        elif model.eos and last not in model.eos:
            output.ids.append(model.eos[0])  # some versions leave it out
    else:
        fetching = sequence.handover is not None and sequence.handover.kind == "decode" and progress.first and first
        code = "transfer_failed" if fetching else "engine_error"
        output.fault = Fault(code, f"TensorRT-LLM ended the request with {reason!r}", retriable=True)


def _prefilled(output: Output, completion: Any) -> Output | None:
    """Convert the answer of the context side: its end, and the parameters for the generation side."""
    reason, params = completion.finish_reason, completion.disaggregated_params
    if reason is None:
        return None
    if reason in ("length", "stop", "not_finished") and params is not None and params.opaque_state is not None:
        output.finish, output.handover = "length", plain(params)
        if output.logprobs:
            output.handover[FIRST_LOGPROBS] = plain_logprobs(output.logprobs)
    else:
        offered = "nothing" if params is None or params.opaque_state is None else "a state"
        message = f"TensorRT-LLM ended a prefill with {reason!r} and handed {offered} over"
        output.fault = Fault("engine_error", message, retriable=True)
    return output


def _logits(sequence: Sequence, completion: Any, result: Any) -> dict[str, Any] | None:
    """Return the logits that a request asked for, as lists."""
    found = {}
    for name, value in (
        ("generation_logits", getattr(completion, "generation_logits", None)),
        ("context_logits", getattr(result, "context_logits", None)),
    ):
        if sequence.extra.get(f"return_{name}") and value is not None:
            found[name] = value.tolist() if hasattr(value, "tolist") else value
    return found or None


def to_logprobs(ids: list[int], positions: list[Any], top: int, token_bytes: TokenBytes) -> list[TokenLogprob]:
    """Convert a position per token: a map of token → (logprob, rank), or in later versions the token's number alone."""
    return [
        _logprob(token, positions[place] if place < len(positions) else None, top, token_bytes)
        for place, token in enumerate(ids)
    ]


def _logprob(token: int, position: Any, top: int, token_bytes: TokenBytes) -> TokenLogprob:
    if not isinstance(position, Mapping):
        return TokenLogprob(token, token_bytes(token), UNKNOWN_LOGPROB if position is None else float(position))
    best = sorted(position.items(), key=lambda entry: -entry[1].logprob)[:top]
    own = position.get(token)
    return TokenLogprob(
        token,
        token_bytes(token),
        UNKNOWN_LOGPROB if own is None else float(own.logprob),
        [(int(other), token_bytes(other), float(entry.logprob)) for other, entry in best],
    )


# Keeps the results of context-only requests while their blocks are on offer, because only by them can these be given up.


class HeldPrefills:
    """Results by sequence id, each for the engine's own time limit. Used on the event loop only."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Any, asyncio.TimerHandle]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, sequence_id: str, result: Any, lease_s: float) -> None:
        timer = asyncio.get_running_loop().call_later(lease_s, self._held.pop, sequence_id, None)
        self._held[sequence_id] = (result, timer)

    def release(self, sequence_id: str) -> None:
        """Cancel a request whose blocks are on offer. Does nothing for an unknown one."""
        held = self._held.pop(sequence_id, None)
        if held is not None:
            held[1].cancel()
            with suppress(Exception):  # fetched meanwhile, or the engine is dying
                held[0].abort()

    def clear(self) -> None:
        for _, timer in self._held.values():
            timer.cancel()
        self._held.clear()
