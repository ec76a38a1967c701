"""`POST /tokenize` and `/detokenize`, as in vLLM's server. The ingress has the tokenizer, so no job is made."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.broker.codec import unpack_u32
from headrace.frontend.apis import HttpApi, Site
from headrace.frontend.auth.caller import check_model
from headrace.frontend.chat_schema import ChatRequest, Message, TokenId, Tool
from headrace.frontend.errors import BadRequest
from headrace.frontend.generation.request_checks import toolbox_of
from headrace.frontend.http.bodies import ReportingDecoder, decode_request, model_name, unsupported
from headrace.frontend.http.exchange import HttpExchange
from headrace.frontend.openai.chat import named_roles, plain_messages
from headrace.frontend.openai.token_generation import (
    PATH,
    TextGenerationAnswer,
    TokenGenerationAnswer,
    TokenGenerationApi,
    TokenGenerationRequest,
)
from headrace.frontend.openapi import either, generation
from headrace.frontend.ports import Models
from headrace.frontend.prompts.model_cache import LoadedModel, ModelCache
from headrace.frontend.prompts.prompt_encoder import LengthLimit


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A prompt or a conversation to tokenise. Without `model` the only served model is used."""

    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # None = yes with a prompt; with a conversation the template adds them
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """The tokens of a text. `token_strs` has the entries of the vocabulary, not text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Tokens to be turned into text. Without `model` the only served model is used."""

    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    tokens: list[TokenId]


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """The text of tokens, special tokens included."""

    prompt: str


# Answers `POST /tokenize` and `/detokenize` in the ingress, which has the tokenizer, without a job.

_MOST = 1 << 20  # tokens; texts too long for the model are counted up to here, which bounds memory

_tokenize = ReportingDecoder(TokenizeRequest)
_detokenize = ReportingDecoder(DetokenizeRequest)


class TokensApi:
    """Answers tokenizer requests. It keeps no state but the cache of loaded models."""

    def __init__(self, model_cache: ModelCache, models: Models) -> None:
        self._model_cache = model_cache
        self._models = models

    async def tokenize(self, body: bytes, exchange: HttpExchange) -> bytes:
        """Return the tokens of a text or a conversation as JSON. Raises a FrontendError or UnknownModel."""
        request = await decode_request(_tokenize, body)
        if (request.prompt is None) == (request.messages is None):
            code = "missing_required_parameter" if request.prompt is None else None
            raise BadRequest("give either prompt or messages", param="prompt", code=code)
        model = await self._model(request.model, exchange)
        if request.prompt is not None:
            text, special, param = request.prompt, request.add_special_tokens is not False, "prompt"
        else:
            text, special, param = await _conversation(request, model, exchange), bool(request.add_special_tokens), "messages"
        ids: list[int] = []
        if text:
            most = max(_MOST, model.card.context_length)
            limit = LengthLimit(context_length=most, wanted=None, truncate=None, param=param)
            ids = unpack_u32((await model.encoder.encode(text, add_special_tokens=special, limit=limit)).packed)

        def answer() -> bytes:
            token = model.encoder.tokenizer.id_to_token
            strs = [token(i) or "" for i in ids] if request.return_token_strs else None
            counted = TokenizeAnswer(count=len(ids), max_model_len=model.card.context_length, tokens=ids, token_strs=strs)
            return msgspec.json.encode(counted)

        return await model.encoder.aside(answer, size=len(ids))

    async def detokenize(self, body: bytes, exchange: HttpExchange) -> bytes:
        """Return the text of tokens as JSON. Raises a FrontendError or UnknownModel."""
        request = await decode_request(_detokenize, body)
        model = await self._model(request.model, exchange)
        ids = request.tokens

        def answer() -> bytes:
            if ids and max(ids) >= model.encoder.vocab_size:
                size = model.encoder.vocab_size
                raise BadRequest(f"token id {max(ids)} is outside the vocabulary of {size}", param="tokens")
            return msgspec.json.encode(DetokenizeAnswer(prompt=model.encoder.decode(ids)))

        return await model.encoder.aside(answer, size=len(ids))

    async def _model(self, name: str | None, exchange: HttpExchange) -> LoadedModel:
        model = await self._model_cache.get(model_name(name, self._models))
        check_model(exchange.scope, model.adapter or model.card.model)
        return model


async def _conversation(request: TokenizeRequest, model: LoadedModel, exchange: HttpExchange) -> str:
    """Return the prompt that the chat route would render. Raises BadRequest."""
    assert request.messages is not None  # noqa: S101  # checked by the caller
    if request.chat_template is not None:
        raise unsupported("chat_template", "cannot be sent with a request; the model brings its own")
    if request.add_generation_prompt and request.continue_final_message:
        raise BadRequest("continue_final_message cannot be combined with add_generation_prompt", param="continue_final_message")
    if model.template is None:
        raise BadRequest(f"{model.card.model!r} has no chat template; give a prompt", param="model", code="no_chat_template")
    chat = ChatRequest(
        model=model.card.model,
        messages=request.messages,
        tools=request.tools,
        tool_choice=None if request.tools is None else "none",
    )
    tools = (await exchange.aside(partial(toolbox_of, chat, model.card))).tools
    takes_parts = model.template.takes_parts(tools=bool(tools))
    messages = await exchange.aside(partial(plain_messages, request.messages, parts=takes_parts))
    continue_final = bool(request.continue_final_message)
    return await model.render(
        named_roles(messages, model.template),
        size=exchange.asked_bytes,
        add_generation_prompt=request.add_generation_prompt is not False and not continue_final,
        continue_final_message=continue_final,
        tools=tools or None,
        extra=request.chat_template_kwargs,
    )


def _mount(site: Site) -> None:
    tokens = TokensApi(site.model_cache, site.models)
    for path in ("/tokenize", "/v1/tokenize"):
        site.answer(path, tokens.tokenize)
    for path in ("/detokenize", "/v1/detokenize"):
        site.answer(path, tokens.detokenize)
    generate = TokenGenerationApi(site.model_cache, site.models, site.settings)
    site.generate(PATH, generate, job=generate)


def _paths() -> dict[str, Any]:
    continued = generation("Continue token ids with token ids", "TokenGenerationRequest", "TokenGenerationAnswer")
    continued["responses"]["200"]["content"] |= either("", "TokenGenerationAnswer", "TextGenerationAnswer")["content"]
    tokenized = generation("Text to tokens", "TokenizeRequest", "TokenizeAnswer", streams=False)
    detokenized = generation("Tokens to text", "DetokenizeRequest", "DetokenizeAnswer", streams=False)
    return {
        "/v1/tokenize": {"post": tokenized},
        "/tokenize": {"post": tokenized},
        "/v1/detokenize": {"post": detokenized},
        "/detokenize": {"post": detokenized},
        "/inference/v1/generate": {"post": continued},
    }


API = HttpApi(
    mount=_mount,
    paths=_paths,
    types=(
        TokenGenerationRequest,
        TokenGenerationAnswer,
        TextGenerationAnswer,
        TokenizeRequest,
        TokenizeAnswer,
        DetokenizeRequest,
        DetokenizeAnswer,
    ),
)
