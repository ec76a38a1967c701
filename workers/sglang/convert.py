"""Translates sequences to SGLang's requests, and SGLang's chunks to outputs. Imports nothing of SGLang."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from headrace.broker.messages.frames import TokenLogprob
from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import Fault, Output, Sequence
from headrace.workers.errors import RequestInvalid, UnsupportedByEngine
from headrace.workers.kit import GUIDED
from headrace.workers.sglang.cpu_plugin import Hook

# Lets SGLang's penalties go on where an interrupted answer stood.
#
# SGLang's presence, frequency and repetition penalties count the tokens that an engine has generated itself. A resumed
# sequence has the tokens of its first engine behind its prompt, so a request says how many of its last tokens are those, and
# these hooks count them when a batch with it begins. SGLang calls the hooks in its scheduler process (`sglang.srt.plugins`),
# on any device. With its overlap schedule SGLang counts each token a step late, so that an answer cannot be resumed exactly
# there.

EMITTED = "headrace_emitted"
"""The entry of `custom_params` with the number of tokens at the end of a request's prompt that were emitted before."""

_LIBRARY = "sglang.srt.sampling.penaltylib"


def emitted_of(requests: list[Any]) -> Iterator[tuple[int, list[int]]]:
    """Yield the rows of a batch that are resumed, each with the tokens that were emitted before."""
    for row, request in enumerate(requests):
        custom = request.sampling_params.custom_params
        count = int(custom.get(EMITTED) or 0) if isinstance(custom, dict) else 0
        if count:
            yield row, list(request.origin_input_ids[-count:])


def counted(kind: str) -> Callable[..., None]:
    """Return the hook behind `_prepare` of the penalizer of this kind."""

    def count(_result: Any, penalizer: Any) -> None:
        import torch

        penalties = getattr(penalizer, f"{kind}_penalties")
        cumulated = getattr(penalizer, f"cumulated_{kind}_penalties")
        for row, tokens in emitted_of(penalizer.orchestrator.reqs()):
            ids = torch.tensor(tokens, dtype=torch.int64, device=cumulated.device)
            if kind == "frequency":  # each time that a token was emitted counts
                cumulated[row].index_add_(0, ids, penalties[row].expand(len(tokens)))
            else:
                cumulated[row, ids] = penalties[row]

    return count


HOOKS = tuple(
    Hook(f"{_LIBRARY}.{kind}_penalty.Batched{kind.title()}Penalizer._prepare", counted(kind), "after")
    for kind in ("presence", "frequency", "repetition")
)


# Ends sequences at the stop tokens that SGLang does not look at.
#
# With `ignore_eos` SGLang 0.5.23 leaves out all checks of tokens, those of the request's own `stop_token_ids` too.


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


PASSED_SAMPLING = frozenset({"custom_params", "watermark"})
"""Fields of a request's `extra` that become sampling parameters of SGLang."""
PASSED_REQUEST = frozenset({"custom_logit_processor", "routed_dp_rank", "disagg_prefill_dp_rank", "kv_hints"})
"""Fields of a request's `extra` that become fields of SGLang's request."""
MOST_REPETITION_PENALTY = 2.0
_BAD_REQUEST = 400

TokenBytes = Callable[[int], bytes]


def to_request(sequence: Sequence, *, seeds: bool, bootstrap: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the fields of SGLang's `GenerateReqInput`. `seeds`: the engine computes deterministically and honours seeds.

    `bootstrap`: the fields of a hand-over. Raises RequestInvalid, UnsupportedByEngine.
    """
    _check_extra(sequence.extra)
    fields: dict[str, Any] = {
        "rid": request_id(sequence.id),
        "input_ids": sequence.token_ids,
        "sampling_params": to_sampling(sequence, seeds=seeds),
        "stream": True,
        "priority": sequence.priority,
        "cache_salt": sequence.cache_salt,
        "session_id": sequence.session_id,
        "lora_path": sequence.adapter,
        "require_reasoning": sequence.reasoning_ended is False and sequence.guided is not None,
        **({} if sequence.rank is None else {"routed_dp_rank": sequence.rank}),
        **{name: sequence.extra[name] for name in PASSED_REQUEST if name in sequence.extra},
        **(bootstrap or {}),
    }
    if sequence.logprobs is not None or sequence.prompt_logprobs is not None:
        fields |= {
            "return_logprob": True,
            "top_logprobs_num": max(sequence.logprobs or 0, sequence.prompt_logprobs or 0),
            "logprob_start_len": -1 if sequence.prompt_logprobs is None else 0,
        }
    return fields


def request_id(sequence_id: str) -> str:
    """Return SGLang's id of a sequence. None is the beginning of another, because SGLang aborts all that begin with an id."""
    return f"{sequence_id}."


def to_sampling(sequence: Sequence, *, seeds: bool) -> dict[str, Any]:
    """Return SGLang's sampling parameters. Raises RequestInvalid, UnsupportedByEngine, naming the parameter."""
    sampling = sequence.sampling
    if sampling.allowed_token_ids is not None:
        raise UnsupportedByEngine("SGLang cannot restrict answers to some tokens", param="allowed_token_ids")
    if sampling.bad_words:
        raise UnsupportedByEngine("SGLang has no bad words", param="bad_words")
    if sampling.seed is not None and sampling.temperature > 0 and not seeds:
        raise UnsupportedByEngine(
            "SGLang honours a seed only if it was started with enable_deterministic_inference", param="seed"
        )
    if seeds and sampling.min_p > 0 and sampling.temperature > 0:
        raise UnsupportedByEngine("SGLang has no min_p with enable_deterministic_inference", param="min_p")
    if not 0 < sampling.repetition_penalty <= MOST_REPETITION_PENALTY:
        raise RequestInvalid(
            f"repetition_penalty must be above 0 and at most {MOST_REPETITION_PENALTY:g} with SGLang, "
            f"got {sampling.repetition_penalty:g}",
            param="repetition_penalty",
        )
    given: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0 if seeds else sampling.min_p,  # beside a seed SGLang's sampler would end with its whole process
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": False,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
        "sampling_seed": sampling.seed if seeds else None,
        **to_grammar(sequence.guided),
        **{name: sequence.extra[name] for name in PASSED_SAMPLING if name in sequence.extra},
        **_emitted(sequence),
    }
    return {name: value for name, value in given.items() if value is not None}


def _emitted(sequence: Sequence) -> dict[str, Any]:
    """Return what tells SGLang's penalties which tokens were emitted before, if the sequence is resumed and has any."""
    sampling, given = sequence.sampling, sequence.extra.get("custom_params")
    emitted = len(sequence.token_ids) - sequence.prompt_tokens
    penalized = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
    own = dict(given) if isinstance(given, Mapping) else {}
    if own.pop(EMITTED, None) is None and not (penalized and emitted > 0):
        return {}
    return {"custom_params": {**own, EMITTED: emitted} if penalized and emitted > 0 else own}


def to_grammar(guided: Mapping[str, Any] | None) -> dict[str, str]:
    """Return SGLang's parameter for a kind of structured output. Raises RequestInvalid for a kind or option it lacks."""
    if not guided:
        return {}
    unknown = sorted(guided.keys() - GUIDED)
    if unknown:
        raise RequestInvalid(
            f"SGLang has no structured output {unknown[0]!r}; known: {', '.join(sorted(GUIDED))}", param=unknown[0]
        )
    if len(guided) > 1:
        raise RequestInvalid(f"one kind of structured output is possible, got {', '.join(sorted(guided))}", param=min(guided))
    ((kind, value),) = guided.items()
    match kind:
        case "json":
            return {"json_schema": value if isinstance(value, str) else json.dumps(value)}
        case "json_object":
            return {"json_schema": json.dumps({"type": "object"})} if value else {}
        case "regex":
            return {"regex": str(value)}
        case "grammar":
            return {"ebnf": str(value)}
        case "choice":
            return {"ebnf": "root ::= " + " | ".join(json.dumps(str(choice)) for choice in value)}
        case _:
            return {"structural_tag": value if isinstance(value, str) else json.dumps(value)}


def _check_extra(extra: Mapping[str, Any]) -> None:
    unknown = sorted(extra.keys() - PASSED_SAMPLING - PASSED_REQUEST)
    if unknown:
        known = ", ".join(sorted(PASSED_SAMPLING | PASSED_REQUEST))
        raise RequestInvalid(f"SGLang knows no option {unknown[0]!r} of a request; known: {known}", param=unknown[0])


def to_output(
    sequence: Sequence, chunk: Mapping[str, Any], *, first: bool, eos: frozenset[int], token_bytes: TokenBytes
) -> Output:
    """Convert a chunk, whose ids are those since the last one. `eos` are the model's own end tokens."""
    about = chunk["meta_info"]
    output = Output(sequence.id, list(chunk["output_ids"]))
    if first:
        output.cached_tokens = about.get("cached_tokens") or 0
        if sequence.prompt_logprobs is not None and sequence.handover is None:
            output.prompt_logprobs = to_prompt_logprobs(about, sequence.prompt_logprobs, token_bytes)
    if sequence.logprobs is not None and output.ids:
        output.logprobs = to_logprobs(about, len(output.ids), sequence.logprobs, token_bytes)
    reason = about.get("finish_reason")
    if reason is None:
        return output
    match reason.get("type"):
        case "length":
            output.finish = "length"
        case "stop":
            output.finish = "stop"
            matched = reason.get("matched")
            if isinstance(matched, int) and (matched not in eos or matched in sequence.sampling.stop_token_ids):
                output.stop = matched
        case "abort" if reason.get("status_code") is None:
            output.finish = "abort"
        case _:
            output.fault = to_fault(reason)
            output.ids, output.logprobs = [], None
    return output


def to_fault(reason: Mapping[str, Any]) -> Fault:
    """Return the fault of a request that SGLang gave up on; only one that is the request's own is final."""
    invalid = reason.get("status_code") == _BAD_REQUEST
    message = f"SGLang ended the request: {reason.get('message') or reason.get('type')}".strip()
    return Fault("invalid_request" if invalid else "engine_error", message, retriable=not invalid)


def to_logprobs(about: Mapping[str, Any], tokens: int, top: int, token_bytes: TokenBytes) -> list[TokenLogprob]:
    """Convert the last `tokens` log probabilities of an answer, with the `top` best of each position, best first."""
    chosen = about["output_token_logprobs"][-tokens:]
    best = (about.get("output_top_logprobs") or [None] * tokens)[-tokens:]
    return [_logprob(one, others, top, token_bytes) for one, others in zip(chosen, best, strict=True)]


def to_prompt_logprobs(about: Mapping[str, Any], top: int, token_bytes: TokenBytes) -> list[TokenLogprob | None]:
    """Convert the log probabilities of a prompt; SGLang has none for its first token, and ranks only among the `top` best."""
    chosen = about["input_token_logprobs"]
    best = about.get("input_top_logprobs") or [None] * len(chosen)
    return [
        None if one[0] is None else _logprob(one, others, top, token_bytes, ranked=True)
        for one, others in zip(chosen, best, strict=True)
    ]


def _logprob(one: Any, others: Any, top: int, token_bytes: TokenBytes, *, ranked: bool = False) -> TokenLogprob:
    value, token = float(one[0]), int(one[1])
    listed = [(int(other[1]), float(other[0])) for other in others or ()]
    alternatives = [(other, token_bytes(other), score) for other, score in listed[:top]]
    rank = next((place for place, (other, _) in enumerate(listed, 1) if other == token), 0) if ranked else 0
    return TokenLogprob(token, token_bytes(token), value, alternatives, rank)
