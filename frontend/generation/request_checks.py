"""Checks a generation request as far as the request and the settings suffice, before a model or a tokenizer is involved."""

from __future__ import annotations

from operator import attrgetter

from headrace.frontend.errors import BadRequest
from headrace.frontend.http.field_checks import unsupported
from headrace.frontend.schema.common import GenerationRequest
from headrace.frontend.settings import FrontendSettings

REFUSED = {
    "use_beam_search": "is not supported here: ask for n choices and take the best",
    "watermarking": "is not supported here",
    "logprob_token_ids": "is not supported here: use top_logprobs",
    "repetition_detection": "is not supported here",
    "kv_transfer_params": "cannot be sent with a request: workers hand over by themselves",
    "ec_transfer_params": "cannot be sent with a request: workers hand over by themselves",
    "mm_processor_kwargs": "cannot be sent with a request: it changes what a request costs",
    "media_io_kwargs": "cannot be sent with a request: it changes what a request costs",
}
"""Parameters of vLLM's server that are refused, and why."""

_refused_of = attrgetter(*REFUSED)


def refuse_unsupported(request: GenerationRequest) -> None:
    """Refuse parameters that would otherwise be ignored silently, and combinations that cannot be. Raises BadRequest."""
    if any(given := _refused_of(request)):
        param = next(param for param, value in zip(REFUSED, given, strict=True) if value)
        raise unsupported(param, REFUSED[param])
    if request.spaces_between_special_tokens is False:
        raise unsupported("spaces_between_special_tokens", "cannot be turned off here")
    if request.truncation_side == "right":
        raise unsupported("truncation_side", '"right" is not supported here: the end of a prompt is kept')
    if request.prompt_logprobs is not None and request.stream:
        raise BadRequest("prompt_logprobs is not available when stream is true", param="prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options is only allowed when stream is true", param="stream_options")


def check_choices(n: int, prompts: int, settings: FrontendSettings) -> None:
    """Refuse a request for more choices than one request may have. Raises BadRequest."""
    if n * prompts > settings.max_choices:
        param = "n" if n > 1 else "prompt"
        raise BadRequest(f"at most {settings.max_choices} choices in one request, this one asks for {n * prompts}", param=param)
