"""Converts `Sequence` to TensorRT-LLM's `SamplingParams`, and what it has given so far to `Output`.

TensorRT-LLM's results grow: `token_ids` and `logprobs` hold everything since the start, and what is new is cut off here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.broker.messages import TokenLogprob
from headrace.workers.engine import Fault, Output, Sequence
from headrace.workers.errors import RequestInvalid, UnsupportedByEngine
from headrace.workers.trtllm import handover
from headrace.workers.trtllm.logits import LogitsProcessors, logit_bias

GUIDED = frozenset({"json", "regex", "choice", "grammar", "json_object", "structural_tag"})
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
    """Return TensorRT-LLM's form of structured output, of which it has all kinds but a choice."""
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
    """Return TensorRT-LLM's priority, between 0 and 1, of which the highest is served first; ours is the other way round."""
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
        output.finish, output.handover = "length", handover.plain(params)
        if output.logprobs:
            output.handover[handover.FIRST_LOGPROBS] = handover.plain_logprobs(output.logprobs)
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
