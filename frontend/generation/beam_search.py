"""Turns `use_beam_search` of vLLM's server into the options of a job, and refuses what a beam search cannot honour."""

from __future__ import annotations

from headrace.broker.messages import Beams
from headrace.broker.models.cards import ModelCard
from headrace.frontend.errors import BadRequest
from headrace.frontend.http.field_checks import unsupported
from headrace.frontend.schema.common import GenerationRequest

NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""Parameters that change the probabilities of tokens, with the value that does not."""

REFUSED = (
    "stop",
    "stop_token_ids",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "prompt_logprobs",
)
"""Other parameters that a search would have to ignore; vLLM's server does so without a word."""


def refuse_with_beam_search(request: GenerationRequest) -> None:
    """Refuse what cannot be combined with `use_beam_search`. Raises BadRequest."""
    if not request.use_beam_search:
        return
    if request.stream:
        raise BadRequest("stream is not available with use_beam_search: beams are known at the end", param="stream")
    given = [param for param in REFUSED if getattr(request, param) not in (None, [], {}, 0, "")]
    given += [param for param, neutral in NEUTRAL.items() if getattr(request, param) not in (None, neutral)]
    if request.response_format is not None and request.response_format.type != "text":
        given.append("response_format")
    if request.thinking_token_budget is not None and request.thinking_token_budget >= 0:
        given.append("thinking_token_budget")
    if given:
        raise unsupported(given[0], "cannot be combined with use_beam_search")


def beams_of(request: GenerationRequest, card: ModelCard) -> Beams | None:
    """Return the options of the search that a request asks for, None if it samples. Raises BadRequest."""
    if not request.use_beam_search:
        return None
    if not card.beam_width:
        raise unsupported("use_beam_search", f"is not supported by the engine of {card.model!r}")
    if (n := request.n or 1) > card.beam_width:
        raise BadRequest(f"a beam search of {card.model!r} has at most {card.beam_width} beams, n is {n}", param="n")
    return Beams(length_penalty=1.0 if request.length_penalty is None else request.length_penalty)
