"""Prompts given as embeddings: base64 of a file of `torch.save`, a row per token, as in vLLM's server."""

from __future__ import annotations

from headrace.broker.torch_tensors import TensorUnreadable, read_matrix
from headrace.frontend.errors import BadRequest
from headrace.frontend.http.field_checks import unsupported
from headrace.frontend.media.inline import Malformed, TooMuch, decode_base64
from headrace.frontend.prompts.model_cache import LoadedModel
from headrace.frontend.prompts.prompt_encoder import LengthLimit, Prompt
from headrace.frontend.schema.completions import CompletionRequest
from headrace.frontend.settings import FrontendSettings

PARAM = "prompt_embeds"


def listed(request: CompletionRequest) -> list[str]:
    """Return the embeddings of a request. Raises BadRequest for parameters that cannot be combined with them."""
    embeds = request.prompt_embeds
    if embeds is None:
        return []
    if request.echo:
        raise BadRequest("echo cannot be combined with prompt_embeds: there is no text", param="echo")
    if request.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs cannot be combined with prompt_embeds: there are no tokens", param="prompt_logprobs")
    return [embeds] if isinstance(embeds, str) else embeds


async def prompt_of(text: str, model: LoadedModel, limit: LengthLimit, settings: FrontendSettings) -> Prompt:
    """Make a prompt of embeddings. Only the length is read from the file; nothing is unpickled.

    Raises BadRequest for a model that does not support embeddings, and for anything but a matrix; ContextTooLong.
    """
    if not model.card.prompt_embeds:
        raise unsupported(PARAM, f"is not supported by {model.name!r}: its workers take tokens only")

    def work() -> Prompt:
        try:
            file = decode_base64(text, limit=settings.max_body_bytes)
            tokens = read_matrix(file).shape[0]
        except (Malformed, TooMuch, TensorUnreadable) as error:
            raise BadRequest(f"{PARAM}: {error}", param=PARAM) from None
        return Prompt(tokens, b"", b"", embeds=file)

    prompt = await model.encoder.aside(work, size=len(text))
    limit.check(prompt.tokens)
    return prompt
