"""Writes errors in Ollama's shape, and answers its routes that change models, which are not served here."""

from __future__ import annotations

import msgspec

from headrace.frontend.errors import FrontendError
from headrace.frontend.ollama.schema import OllamaFault

PREFIX = "/api/"

# names of parameters in the chat that a request became → in the request
_NAMES = {
    "max_tokens": "options.num_predict",
    "stop": "options.stop",
    "temperature": "options.temperature",
    "response_format.json_schema.schema": "format",
    "structured_outputs": "format",
    "response_format": "format",
}


class OllamaForm:
    """The error form of Ollama's API: one sentence, which names the parameter."""

    def __call__(self, error: FrontendError, /) -> bytes:
        message = str(error)
        param = _NAMES.get(error.param or "", error.param)
        if param is not None and param not in message:
            message = f"{param}: {message}"
        return msgspec.json.encode(OllamaFault(error=message))
