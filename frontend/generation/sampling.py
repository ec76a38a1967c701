"""Sampling, stop strings and guided decoding of a request, with the model's defaults for parameters that are not given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from headrace.broker.messages import Sampling
from headrace.broker.models.cards import ModelCard
from headrace.frontend.errors import BadRequest
from headrace.frontend.http.field_checks import missing
from headrace.frontend.schema.common import GenerationRequest, ResponseFormat, StructuredOutputs

_WEIGHTS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_weights_of = attrgetter(*_WEIGHTS)
_PLAIN: tuple[Any, ...] = _weights_of(Sampling())
_WITH_IDS = ("stop_token_ids", "logit_bias", "allowed_token_ids")
_ids_in = attrgetter(*_WITH_IDS)
_constraints_in = attrgetter(
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "response_format")
)
_NOT_GUIDED = (None,) * 6

GUIDED_OPTIONS = frozenset({"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"})


def sampling_of(request: GenerationRequest, card: ModelCard, *, max_tokens: int) -> Sampling:
    """Return the sampling parameters.

    Raises BadRequest for token ids outside the vocabulary and for `min_tokens` above `max_tokens`.
    """
    defaults = card.default_sampling
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise BadRequest(f"min_tokens ({min_tokens}) must not exceed max_tokens ({max_tokens})", param="min_tokens")
    stop_token_ids = request.stop_token_ids or []
    if extra_stops := defaults.get("stop_token_ids"):
        stop_token_ids = list(dict.fromkeys([*stop_token_ids, *extra_stops]))
    if card.vocab_size:
        for param, ids in zip(_WITH_IDS, _ids_in(request), strict=True):
            if ids:
                _check_ids(ids, card.vocab_size, param)
    given = [usual if value is None else value for value, usual in zip(_weights_of(request), _usual(defaults), strict=True)]
    temperature, top_p, top_k, min_p, presence_penalty, frequency_penalty, repetition_penalty = given
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=max(0, top_k),
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        seed=request.seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=stop_token_ids,
        logit_bias=request.logit_bias or {},
        allowed_token_ids=request.allowed_token_ids,
        bad_words=request.bad_words or [],
    )


def _usual(defaults: Mapping[str, Any]) -> Sequence[Any]:
    """Return the values of `_WEIGHTS` for a request that gives none."""
    if not defaults:
        return _PLAIN
    return [defaults.get(name, plain) for name, plain in zip(_WEIGHTS, _PLAIN, strict=True)]


def _check_ids(ids: Any, vocab_size: int, param: str) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise BadRequest(f"token id {token} in {param} is outside the vocabulary of {vocab_size}", param=param)


def stops_of(request: GenerationRequest) -> list[str]:
    """Return the stop strings. Raises BadRequest for an empty one; their number and length are checked with the plan."""
    stop = request.stop
    if not stop:
        if stop == "":
            raise BadRequest("stop must not be an empty string", param="stop")
        return []
    stops = [stop] if isinstance(stop, str) else stop
    if not all(stops):
        raise BadRequest("stop must not contain an empty string", param="stop")
    return stops


def guided_of(request: GenerationRequest) -> dict[str, Any] | None:
    """Return the constraint on the output as `Generation.guided` has it. Raises BadRequest if there is more than one."""
    if _constraints_in(request) == _NOT_GUIDED:
        return None
    constraints: dict[str, tuple[str, Any]] = {}  # kind → (its parameter, value)

    def add(kind: str, param: str, value: Any) -> None:
        if value is None or value is False:
            return
        if constraints:
            raise BadRequest(f"{param} cannot be combined with {next(iter(constraints.values()))[0]}", param=param)
        constraints[kind] = (param, value)

    add("json", "guided_json", request.guided_json)
    add("regex", "guided_regex", request.guided_regex)
    add("choice", "guided_choice", request.guided_choice)
    add("grammar", "guided_grammar", request.guided_grammar)
    options: dict[str, Any] = {}
    if (outputs := request.structured_outputs) is not None:
        for kind in outputs.__struct_fields__:
            if kind not in GUIDED_OPTIONS:
                add(kind, f"structured_outputs.{kind}", getattr(outputs, kind))
            elif value := getattr(outputs, kind):
                options[kind] = value
    if request.response_format is not None:
        add(*_response_format(request.response_format))
    if not constraints:
        if request.structured_outputs is not None:
            kinds = ", ".join(kind for kind in StructuredOutputs.__struct_fields__ if kind not in GUIDED_OPTIONS)
            raise BadRequest(f"structured_outputs needs one of {kinds}", param="structured_outputs")
        return None
    return {kind: value for kind, (_, value) in constraints.items()} | options


def _response_format(shape: ResponseFormat) -> tuple[str, str, Any]:
    """Return kind, parameter and value; the value is None for plain text."""
    if shape.type == "json_object":
        return "json_object", "response_format", True
    if shape.type == "structural_tag":
        return "structural_tag", "response_format", _structural_tag(shape)
    if shape.type == "text":
        return "json", "response_format", None
    if shape.json_schema is None or shape.json_schema.schema is None:
        raise missing("response_format.json_schema.schema")
    return "json", "response_format", shape.json_schema.schema


def _structural_tag(shape: ResponseFormat) -> str:
    """Return the structural tag as JSON text, the form that grammar engines take."""
    tag: dict[str, Any] = {"type": "structural_tag"}
    if shape.format is not None:
        tag["format"] = shape.format
    elif shape.structures is not None and shape.triggers is not None:
        tag |= {"structures": shape.structures, "triggers": shape.triggers}
    else:
        raise missing("response_format.format")
    return msgspec.json.encode(tag).decode()
