"""Refuses a generation request that asks more of a worker than one request may, with the client's name of the parameter."""

from __future__ import annotations

from headrace.broker.errors import RequestOverLimit
from headrace.broker.messages import Generation
from headrace.broker.request_limits import check_limits
from headrace.frontend.errors import BadRequest
from headrace.frontend.schema.common import GenerationRequest

_GUIDED = "structured_outputs"


def check_size(generation: Generation, request: GenerationRequest | None, *, choices: int, prompt_tokens: int) -> None:
    """Check a request. `request`: as the client sent it, None if it came as a Generation. Raises BadRequest."""
    try:
        check_limits(generation, choices=choices, prompt_tokens=prompt_tokens)
    except RequestOverLimit as error:
        param = _name(error.param, request) if request is not None else error.param
        raise BadRequest(str(error).replace(error.param, param, 1), param=param, code="parameter_too_large") from None


def _name(param: str, request: GenerationRequest) -> str:
    if not param.startswith(_GUIDED) or request.structured_outputs is not None:
        return param
    names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "response_format")
    return next((name for name in names if getattr(request, name) is not None), param)
