"""Builds `/openapi.json` from the structs that check the requests, so that it cannot be out of date."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Any

import msgspec

from headrace.frontend.admin.cancel import CancelledRequest
from headrace.frontend.anthropic.models import AnthropicModel, AnthropicModelList
from headrace.frontend.anthropic.schema import AnthropicError, CountRequest, MessageAnswer, MessagesRequest, TokenCount
from headrace.frontend.files.describe import file_paths
from headrace.frontend.files.schema import SCHEMAS as FILE_SCHEMAS
from headrace.frontend.ollama.schema import (
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaEmbedAnswer,
    OllamaEmbedRequest,
    OllamaFault,
    OllamaModels,
    OllamaPromptAnswer,
    OllamaPromptRequest,
    OllamaShown,
    OllamaShowRequest,
    OllamaVectorAnswer,
    OllamaVectorRequest,
    OllamaVersion,
)
from headrace.frontend.pages.welcome import Welcome
from headrace.frontend.pooling.schema import (
    ClassifyAnswer,
    ClassifyRequest,
    EmbeddingAnswer,
    EmbeddingRequest,
    PoolingAnswer,
    PoolingRequest,
    RerankAnswer,
    RerankRequest,
    ScoreAnswer,
    ScoreRequest,
)
from headrace.frontend.responses.answer import CompactedAnswer, DeletedResponse, InputTokens, ItemList, ResponseAnswer
from headrace.frontend.responses.conversation_schema import AddedItems, Conversation, DeletedConversation, NewConversation
from headrace.frontend.responses.schema import CompactRequest, InputTokensRequest, ResponsesRequest
from headrace.frontend.schema.answers import ChatAnswer, CompletionAnswer, ErrorAnswer, ModelEntry, ModelList
from headrace.frontend.schema.chat import ChatRequest
from headrace.frontend.schema.completions import CompletionRequest
from headrace.frontend.schema.stored import ChatList, ChatMessageList, DeletedChat, MetadataChange, StoredChat, StoredMessage
from headrace.frontend.tokens.generation_schema import TextGenerationAnswer, TokenGenerationAnswer, TokenGenerationRequest
from headrace.frontend.tokens.schema import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest

_ERRORS = {
    "400": "a parameter is missing, wrong or not supported; `param` names it",
    "404": "no such model or route",
    "405": "wrong method",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "414": "the URL is too long",
    "431": "the headers are too many or too large",
    "499": "the request was cancelled by a call",
    "429": "a queue is full; see Retry-After and `code`",
    "500": "internal error",
    "502": "the engine failed",
    "503": "no worker is ready, or the broker cannot be reached",
    "504": "the deadline passed",
}


@cache
def build_openapi() -> bytes:
    """Return the OpenAPI 3.1 document as JSON."""
    types = (
        *(ChatRequest, CompletionRequest, ChatAnswer, CompletionAnswer, ModelEntry, ModelList, ErrorAnswer, CancelledRequest),
        *(AnthropicModel, AnthropicModelList, Welcome),
        *(ResponsesRequest, ResponseAnswer, InputTokensRequest, InputTokens, DeletedResponse, ItemList),
        *(CompactRequest, CompactedAnswer),
        *(StoredChat, ChatList, DeletedChat, StoredMessage, ChatMessageList, MetadataChange),
        *(NewConversation, AddedItems, Conversation, DeletedConversation),
        *FILE_SCHEMAS,
        *(MessagesRequest, MessageAnswer, CountRequest, TokenCount, AnthropicError),
        *(EmbeddingRequest, EmbeddingAnswer, PoolingRequest, PoolingAnswer, ClassifyRequest, ClassifyAnswer),
        *(ScoreRequest, ScoreAnswer, RerankRequest, RerankAnswer),
        *(OllamaChatRequest, OllamaChatAnswer, OllamaPromptRequest, OllamaPromptAnswer, OllamaEmbedRequest, OllamaEmbedAnswer),
        *(OllamaVectorRequest, OllamaVectorAnswer, OllamaShowRequest, OllamaShown, OllamaModels, OllamaVersion, OllamaFault),
        *(TokenGenerationRequest, TokenGenerationAnswer, TextGenerationAnswer),
        *(TokenizeRequest, TokenizeAnswer, DetokenizeRequest, DetokenizeAnswer),
    )
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {
        **_chats(),
        **_conversations(),
        **file_paths(_stored_errors()),
        "/v1/completions": {"post": _generation("Continue one or more prompts", "CompletionRequest", "CompletionAnswer")},
        **_responses(),
        **_messages(),
        **_pooling(),
        "/inference/v1/generate": {"post": _tokens()},
        **_ollama(),
        **_models(),
        "/v1/requests/{id}": {
            "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}],
            "delete": _get(
                "End a running request",
                {
                    "200": _json("it was running and is ended", "CancelledRequest"),
                    "404": _json("no such request is running", "ErrorAnswer"),
                    "503": _json("not every frontend could be asked", "ErrorAnswer"),
                },
            ),
        },
        "/v1/streams/{job}": {
            "parameters": [{"name": "job", "in": "path", "required": True, "schema": {"type": "string"}}],
            "get": _get(
                "Follow a durable stream",
                {
                    "200": {"description": "its events", "content": {"text/event-stream": {"schema": {"type": "string"}}}},
                    "400": _json("Last-Event-ID is of no event of it", "ErrorAnswer"),
                    "404": _json("there is no such job", "ErrorAnswer"),
                    "410": _json("its events are not stored any more", "ErrorAnswer"),
                },
            ),
        },
        **_server(),
    }
    info = {"title": "Headrace", "version": metadata.version("headrace"), "description": "LLM serving over NATS JetStream"}
    document = {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}
    return msgspec.json.encode(document)


def _models() -> dict[str, Any]:
    """Return the paths that describe models. With the header of Anthropic's clients they answer in Anthropic's shape."""
    where = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    version = {"name": "anthropic-version", "in": "header", "schema": {"type": "string"}}
    page = [
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 1000}},
        {"name": "after_id", "in": "query", "schema": {"type": "string"}},
        {"name": "before_id", "in": "query", "schema": {"type": "string"}},
    ]
    listed = {"200": _either("the models", "ModelList", "AnthropicModelList")}
    listed["400"] = _json("the page does not exist", "AnthropicError")
    one = {"200": _either("the model", "ModelEntry", "AnthropicModel")}
    one["404"] = _either("no such model", "ErrorAnswer", "AnthropicError")
    return {
        "/v1/models": {"parameters": [version, *page], "get": _get("List the served models", listed)},
        "/v1/models/{model}": {"parameters": [where, version], "get": _get("One model", one)},
    }


def _server() -> dict[str, Any]:
    """Return the paths that tell of the server itself."""
    page = {"description": "a page", "content": {"text/html": {"schema": {"type": "string"}}}}
    welcome = _json("what this server is", "Welcome")
    welcome["content"] |= page["content"]
    plain = {"200": {"description": "healthy"}, "503": {"description": "unhealthy"}}
    return {
        "/": {"get": _get("What this server is", {"200": welcome})},
        "/docs": {"get": _get("This document as a page", {"200": page})},
        "/health": {"get": _get("What is up", _states("healthy", "unhealthy"))},
        "/ready": {"get": _get("Whether some model can answer now", _states("ready", "not ready"))},
        "/live": {"get": _get("Whether the process runs", {"200": {"description": "it does"}})},
        "/ping": {"get": _get("Health as a status alone", plain), "post": _get("Health as a status alone", plain)},
        "/load": {"get": _get("How many requests use an engine or wait for one", _object("the count, as `server_load`"))},
        "/version": {"get": _get("The version of this server", _object("the version"))},
        "/metrics": {"get": _get("Prometheus metrics", {"200": {"description": "text format", "content": {"text/plain": {}}}})},
        "/openapi.json": {"get": _get("This document", {"200": {"description": "OpenAPI 3.1"}})},
    }


_PAGE = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
    {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
]


def _stored_errors() -> dict[str, Any]:
    """Return the errors of routes over stored objects."""
    return {
        status: _json(text, "ErrorAnswer") for status, text in _ERRORS.items() if status in ("400", "404", "408", "413", "503")
    }


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _changing(summary: str, request: str, answer: str) -> dict[str, Any]:
    """Return a POST that changes a stored object."""
    return _generation(summary, request, answer, streams=False)


def _chats() -> dict[str, Any]:
    """Return the paths of chats and of stored completions."""
    one = "/v1/chat/completions/{completion_id}"
    wrong = _stored_errors()
    filters = [{"name": "model", "in": "query", "schema": {"type": "string"}}]
    return {
        "/v1/chat/completions": {
            "post": _generation("Answer a conversation", "ChatRequest", "ChatAnswer"),
            "get": {
                "parameters": [*_PAGE, *filters],
                **_get("Stored completions", {"200": _json("a page of them", "ChatList"), **wrong}),
            },
        },
        one: {
            "parameters": [_in_path("completion_id")],
            "get": _get("A stored completion", {"200": _json("the completion", "StoredChat"), **wrong}),
            "post": _changing("Change its metadata", "MetadataChange", "StoredChat"),
            "delete": _get("Forget a stored completion", {"200": _json("it is gone", "DeletedChat"), **wrong}),
        },
        f"{one}/messages": {
            "parameters": [_in_path("completion_id"), *_PAGE],
            "get": _get("The messages it answers", {"200": _json("a page of them", "ChatMessageList"), **wrong}),
        },
    }


def _conversations() -> dict[str, Any]:
    """Return the paths of conversations."""
    one = "/v1/conversations/{conversation_id}"
    wrong = _stored_errors()
    item = {"application/json": {"schema": {"type": "object"}}}
    where = _in_path("conversation_id")
    return {
        "/v1/conversations": {"post": _changing("Create a conversation", "NewConversation", "Conversation")},
        one: {
            "parameters": [where],
            "get": _get("A conversation", {"200": _json("the conversation", "Conversation"), **wrong}),
            "post": _changing("Change its metadata", "MetadataChange", "Conversation"),
            "delete": _get("Forget a conversation", {"200": _json("it is gone", "DeletedConversation"), **wrong}),
        },
        f"{one}/items": {
            "parameters": [where],
            "get": {"parameters": _PAGE, **_get("Its items", {"200": _json("a page of them", "ItemList"), **wrong})},
            "post": _changing("Add items", "AddedItems", "ItemList"),
        },
        f"{one}/items/{{item_id}}": {
            "parameters": [where, _in_path("item_id")],
            "get": _get("An item", {"200": {"description": "the item", "content": item}, **wrong}),
            "delete": _get("Remove an item", {"200": _json("the conversation", "Conversation"), **wrong}),
        },
    }


def _responses() -> dict[str, Any]:
    """Return the paths of the Responses API."""
    where = _in_path("response_id")
    wrong = {status: _json(text, "ErrorAnswer") for status, text in _ERRORS.items() if status in ("400", "404", "503")}
    one = "/v1/responses/{response_id}"
    return {
        "/v1/responses": {"post": _generation("Answer items with items", "ResponsesRequest", "ResponseAnswer")},
        "/v1/responses/input_tokens": {
            "post": _generation("Count a prompt", "InputTokensRequest", "InputTokens", streams=False)
        },
        "/v1/responses/compact": {
            "post": _generation("Compact a conversation", "CompactRequest", "CompactedAnswer", streams=False)
        },
        one: {
            "parameters": [where],
            "get": {
                "parameters": [
                    {"name": "stream", "in": "query", "schema": {"type": "boolean"}},
                    {"name": "starting_after", "in": "query", "schema": {"type": "integer", "minimum": 0}},
                ],
                **_get("A stored response, or its events", {"200": _streamed("ResponseAnswer"), **wrong}),
            },
            "delete": _get("Forget a stored response", {"200": _json("it is gone", "DeletedResponse"), **wrong}),
        },
        f"{one}/input_items": {
            "parameters": [where, *_PAGE],
            "get": _get("The items it answered", {"200": _json("a page of them", "ItemList"), **wrong}),
        },
        f"{one}/cancel": {
            "parameters": [where],
            "post": _get("Stop one in the background", {"200": _json("the response", "ResponseAnswer"), **wrong}),
        },
    }


def _messages() -> dict[str, Any]:
    """Return the paths of Anthropic's Messages API."""
    error = "AnthropicError"
    count = _generation("Count a prompt", "CountRequest", "TokenCount", error=error, streams=False)
    answer = _generation("Answer messages with a message", "MessagesRequest", "MessageAnswer", error=error)
    return {"/v1/messages": {"post": answer}, "/v1/messages/count_tokens": {"post": count}}


def _ollama() -> dict[str, Any]:
    """Return the paths of Ollama's API."""

    def asking(summary: str, request: str, answer: str, *, streams: bool = False) -> dict[str, Any]:
        operation = _generation(summary, request, answer, error="OllamaFault", streams=False)
        if streams:
            operation["responses"]["200"]["content"]["application/x-ndjson"] = {"schema": {"type": "string"}}
        return {"post": operation}

    models = {"200": _json("the models", "OllamaModels")}
    return {
        "/api/chat": asking("Answer a conversation, in lines", "OllamaChatRequest", "OllamaChatAnswer", streams=True),
        "/api/generate": asking("Answer a prompt, in lines", "OllamaPromptRequest", "OllamaPromptAnswer", streams=True),
        "/api/embed": asking("Embed texts", "OllamaEmbedRequest", "OllamaEmbedAnswer"),
        "/api/embeddings": asking("Embed a text, in the older form", "OllamaVectorRequest", "OllamaVectorAnswer"),
        "/api/show": asking("Describe a model", "OllamaShowRequest", "OllamaShown"),
        "/api/tags": {"get": _get("List the served models", models)},
        "/api/ps": {"get": _get("List the loaded models, which are the served ones", models)},
        "/api/version": {"get": _get("The version of the API", {"200": _json("the version", "OllamaVersion")})},
    }


def _tokens() -> dict[str, Any]:
    """Return the operation that continues token ids."""
    operation = _generation("Continue token ids with token ids", "TokenGenerationRequest", "TokenGenerationAnswer")
    either = _either("", "TokenGenerationAnswer", "TextGenerationAnswer")
    operation["responses"]["200"]["content"] |= either["content"]
    return operation


def _pooling() -> dict[str, Any]:
    """Return the paths of the pooling and tokenizer routes."""
    routes = {
        ("/v1/embeddings",): ("Embed inputs", "EmbeddingRequest", "EmbeddingAnswer"),
        ("/v1/score", "/score"): ("Score pairs of texts", "ScoreRequest", "ScoreAnswer"),
        ("/v1/rerank", "/v2/rerank", "/rerank"): ("Order documents by a query", "RerankRequest", "RerankAnswer"),
        ("/v1/classify", "/classify"): ("Classify inputs", "ClassifyRequest", "ClassifyAnswer"),
        ("/v1/pooling", "/pooling"): ("The plain vectors of inputs", "PoolingRequest", "PoolingAnswer"),
        ("/v1/tokenize", "/tokenize"): ("Text to tokens", "TokenizeRequest", "TokenizeAnswer"),
        ("/v1/detokenize", "/detokenize"): ("Tokens to text", "DetokenizeRequest", "DetokenizeAnswer"),
    }
    return {path: {"post": _generation(*texts, streams=False)} for paths, texts in routes.items() for path in paths}


def _json(description: str, schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": description, "content": content}


def _either(description: str, *schemas: str) -> dict[str, Any]:
    options = [{"$ref": f"#/components/schemas/{schema}"} for schema in schemas]
    return {"description": description, "content": {"application/json": {"schema": {"anyOf": options}}}}


def _object(description: str) -> dict[str, Any]:
    return {"200": {"description": description, "content": {"application/json": {"schema": {"type": "object"}}}}}


def _streamed(schema: str) -> dict[str, Any]:
    answer = _json("the answer; with `stream` server-sent events", schema)
    event = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
    answer["content"]["text/event-stream"] = {"schema": event}  # of each event
    return answer


def _get(summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    return {"summary": summary, "responses": responses}


def _states(good: str, bad: str) -> dict[str, Any]:
    body = {"application/json": {"schema": {"type": "object"}}}
    return {"200": {"description": good, "content": body}, "503": {"description": bad, "content": body}}


def _generation(summary: str, request: str, answer: str, *, error: str = "ErrorAnswer", streams: bool = True) -> dict[str, Any]:
    whole = _streamed(answer) if streams else _json("the answer", answer)
    body = {"required": True, "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{request}"}}}}
    statuses = {**_ERRORS, "529": _ERRORS["503"]} if error == "AnthropicError" else _ERRORS
    responses = {"200": whole} | {status: _json(text, error) for status, text in statuses.items()}
    return {"summary": summary, "requestBody": body, "responses": responses}
