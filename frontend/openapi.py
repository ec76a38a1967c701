"""Builds `/openapi.json` from the structs that check the requests, so that it cannot be out of date."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Any

import msgspec

from headrace.frontend.admin import CancelledRequest
from headrace.frontend.answer_schema import (
    ChatAnswer,
    ChatList,
    ChatMessageList,
    CompletionAnswer,
    DeletedChat,
    ErrorAnswer,
    MetadataChange,
    ModelEntry,
    ModelList,
    StoredChat,
    StoredMessage,
)
from headrace.frontend.anthropic.api import AnthropicModel, AnthropicModelList
from headrace.frontend.anthropic.schema import AnthropicError, CountRequest, MessageAnswer, MessagesRequest, TokenCount
from headrace.frontend.batches import SCHEMAS as BATCH_SCHEMAS
from headrace.frontend.batches import batch_paths
from headrace.frontend.chat_schema import ChatRequest, CompletionRequest
from headrace.frontend.files import SCHEMAS as FILE_SCHEMAS
from headrace.frontend.files import file_paths
from headrace.frontend.images import SCHEMAS as IMAGES_SCHEMAS
from headrace.frontend.ollama.schema import SCHEMAS as OLLAMA_SCHEMAS
from headrace.frontend.openai.token_generation import TextGenerationAnswer, TokenGenerationAnswer, TokenGenerationRequest
from headrace.frontend.openai.tokens_api import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from headrace.frontend.pages import Welcome
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
from headrace.frontend.responses.schema import (
    AddedItems,
    CompactRequest,
    Conversation,
    DeletedConversation,
    InputTokensRequest,
    NewConversation,
    ResponsesRequest,
)
from headrace.frontend.transcriptions import SCHEMAS as TRANSCRIPTIONS_SCHEMAS
from headrace.frontend.videos import SCHEMAS as VIDEOS_SCHEMAS

# Builds the operations and answers that the description of the API consists of.

ERRORS = {
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

PAGE = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
    {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
]


def stored_errors() -> dict[str, Any]:
    return {
        status: json_answer(text, "ErrorAnswer")
        for status, text in ERRORS.items()
        if status in ("400", "404", "408", "413", "503")
    }


def in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def changing(summary: str, request: str, answer: str) -> dict[str, Any]:
    return generation(summary, request, answer, streams=False)


def generation(summary: str, request: str, answer: str, *, error: str = "ErrorAnswer", streams: bool = True) -> dict[str, Any]:
    """Return a POST with a body, all of whose errors have the shape `error`. With `streams` it may be answered by events."""
    whole = streamed(answer) if streams else json_answer("the answer", answer)
    body = {"required": True, "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{request}"}}}}
    statuses = {**ERRORS, "529": ERRORS["503"]} if error == "AnthropicError" else ERRORS
    responses = {"200": whole} | {status: json_answer(text, error) for status, text in statuses.items()}
    return {"summary": summary, "requestBody": body, "responses": responses}


def operation(summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    """Return an operation without a body."""
    return {"summary": summary, "responses": responses}


def json_answer(description: str, schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": description, "content": content}


def either(description: str, *schemas: str) -> dict[str, Any]:
    options = [{"$ref": f"#/components/schemas/{schema}"} for schema in schemas]
    return {"description": description, "content": {"application/json": {"schema": {"anyOf": options}}}}


def streamed(schema: str) -> dict[str, Any]:
    answer = json_answer("the answer; with `stream` server-sent events", schema)
    event = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
    answer["content"]["text/event-stream"] = {"schema": event}  # of each event
    return answer


def some_object(description: str) -> dict[str, Any]:
    """Return the answers of an operation that gives an object of no fixed type."""
    return {"200": {"description": description, "content": {"application/json": {"schema": {"type": "object"}}}}}


def states(good: str, bad: str) -> dict[str, Any]:
    """Return the answers 200 and 503 of an operation that tells a state."""
    body = {"application/json": {"schema": {"type": "object"}}}
    return {"200": {"description": good, "content": body}, "503": {"description": bad, "content": body}}


CHATS_TYPES: tuple[type[msgspec.Struct], ...] = (
    ChatRequest,
    CompletionRequest,
    ChatAnswer,
    CompletionAnswer,
    ModelEntry,
    ModelList,
    ErrorAnswer,
    AnthropicModel,
    AnthropicModelList,
    StoredChat,
    ChatList,
    DeletedChat,
    StoredMessage,
    ChatMessageList,
    MetadataChange,
)


def chats_paths() -> dict[str, Any]:
    completions = generation("Continue one or more prompts", "CompletionRequest", "CompletionAnswer")
    return {**_chats(), "/v1/completions": {"post": completions}, **_models()}


def _chats() -> dict[str, Any]:
    one = "/v1/chat/completions/{completion_id}"
    wrong = stored_errors()
    filters = [{"name": "model", "in": "query", "schema": {"type": "string"}}]
    return {
        "/v1/chat/completions": {
            "post": generation("Answer a conversation", "ChatRequest", "ChatAnswer"),
            "get": {
                "parameters": [*PAGE, *filters],
                **operation("Stored completions", {"200": json_answer("a page of them", "ChatList"), **wrong}),
            },
        },
        one: {
            "parameters": [in_path("completion_id")],
            "get": operation("A stored completion", {"200": json_answer("the completion", "StoredChat"), **wrong}),
            "post": changing("Change its metadata", "MetadataChange", "StoredChat"),
            "delete": operation("Forget a stored completion", {"200": json_answer("it is gone", "DeletedChat"), **wrong}),
        },
        f"{one}/messages": {
            "parameters": [in_path("completion_id"), *PAGE],
            "get": operation("The messages it answers", {"200": json_answer("a page of them", "ChatMessageList"), **wrong}),
        },
    }


def _models() -> dict[str, Any]:
    """Return the paths that describe models. With the header of Anthropic's clients they answer in Anthropic's shape."""
    where = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    version = {"name": "anthropic-version", "in": "header", "schema": {"type": "string"}}
    page = [
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 1000}},
        {"name": "after_id", "in": "query", "schema": {"type": "string"}},
        {"name": "before_id", "in": "query", "schema": {"type": "string"}},
    ]
    listed = {"200": either("the models", "ModelList", "AnthropicModelList")}
    listed["400"] = json_answer("the page does not exist", "AnthropicError")
    one = {"200": either("the model", "ModelEntry", "AnthropicModel")}
    one["404"] = either("no such model", "ErrorAnswer", "AnthropicError")
    return {
        "/v1/models": {"parameters": [version, *page], "get": operation("List the served models", listed)},
        "/v1/models/{model}": {"parameters": [where, version], "get": operation("One model", one)},
    }


IMAGES_TYPES = IMAGES_SCHEMAS


def images_paths() -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/ImageRequest"}
    return {
        "/v1/images/generations": {
            "post": {
                "summary": "Make pictures of a prompt",
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {"200": json_answer("the pictures", "ImageAnswer")}
                | {status: json_answer(text, "ErrorAnswer") for status, text in ERRORS.items()},
            }
        }
    }


MESSAGES_TYPES: tuple[type[msgspec.Struct], ...] = (MessagesRequest, MessageAnswer, CountRequest, TokenCount, AnthropicError)


def messages_paths() -> dict[str, Any]:
    error = "AnthropicError"
    count = generation("Count a prompt", "CountRequest", "TokenCount", error=error, streams=False)
    answer = generation("Answer messages with a message", "MessagesRequest", "MessageAnswer", error=error)
    return {"/v1/messages": {"post": answer}, "/v1/messages/count_tokens": {"post": count}}


OLLAMA_TYPES = OLLAMA_SCHEMAS


def ollama_paths() -> dict[str, Any]:
    def asking(summary: str, request: str, answer: str, *, streams: bool = False) -> dict[str, Any]:
        post = generation(summary, request, answer, error="OllamaFault", streams=False)
        if streams:
            post["responses"]["200"]["content"]["application/x-ndjson"] = {"schema": {"type": "string"}}
        return {"post": post}

    models = {"200": json_answer("the models", "OllamaModels")}
    return {
        "/api/chat": asking("Answer a conversation, in lines", "OllamaChatRequest", "OllamaChatAnswer", streams=True),
        "/api/generate": asking("Answer a prompt, in lines", "OllamaPromptRequest", "OllamaPromptAnswer", streams=True),
        "/api/embed": asking("Embed texts", "OllamaEmbedRequest", "OllamaEmbedAnswer"),
        "/api/embeddings": asking("Embed a text, in the older form", "OllamaVectorRequest", "OllamaVectorAnswer"),
        "/api/show": asking("Describe a model", "OllamaShowRequest", "OllamaShown"),
        "/api/tags": {"get": operation("List the served models", models)},
        "/api/ps": {"get": operation("List the loaded models, which are the served ones", models)},
        "/api/version": {"get": operation("The version of the API", {"200": json_answer("the version", "OllamaVersion")})},
    }


POOLING_TYPES: tuple[type[msgspec.Struct], ...] = (
    EmbeddingRequest,
    EmbeddingAnswer,
    PoolingRequest,
    PoolingAnswer,
    ClassifyRequest,
    ClassifyAnswer,
    ScoreRequest,
    ScoreAnswer,
    RerankRequest,
    RerankAnswer,
)


def pooling_paths() -> dict[str, Any]:
    routes = {
        ("/v1/embeddings",): ("Embed inputs", "EmbeddingRequest", "EmbeddingAnswer"),
        ("/v1/score", "/score"): ("Score pairs of texts", "ScoreRequest", "ScoreAnswer"),
        ("/v1/rerank", "/v2/rerank", "/rerank"): ("Order documents by a query", "RerankRequest", "RerankAnswer"),
        ("/v1/classify", "/classify"): ("Classify inputs", "ClassifyRequest", "ClassifyAnswer"),
        ("/v1/pooling", "/pooling"): ("The plain vectors of inputs", "PoolingRequest", "PoolingAnswer"),
    }
    return {path: {"post": generation(*texts, streams=False)} for names, texts in routes.items() for path in names}


RESPONSES_TYPES: tuple[type[msgspec.Struct], ...] = (
    ResponsesRequest,
    ResponseAnswer,
    InputTokensRequest,
    InputTokens,
    DeletedResponse,
    ItemList,
    CompactRequest,
    CompactedAnswer,
    NewConversation,
    AddedItems,
    Conversation,
    DeletedConversation,
)


def responses_paths() -> dict[str, Any]:
    return {**_conversations(), **_responses()}


def _conversations() -> dict[str, Any]:
    one = "/v1/conversations/{conversation_id}"
    wrong = stored_errors()
    item = {"application/json": {"schema": {"type": "object"}}}
    where = in_path("conversation_id")
    return {
        "/v1/conversations": {"post": changing("Create a conversation", "NewConversation", "Conversation")},
        one: {
            "parameters": [where],
            "get": operation("A conversation", {"200": json_answer("the conversation", "Conversation"), **wrong}),
            "post": changing("Change its metadata", "MetadataChange", "Conversation"),
            "delete": operation("Forget a conversation", {"200": json_answer("it is gone", "DeletedConversation"), **wrong}),
        },
        f"{one}/items": {
            "parameters": [where],
            "get": {"parameters": PAGE, **operation("Its items", {"200": json_answer("a page of them", "ItemList"), **wrong})},
            "post": changing("Add items", "AddedItems", "ItemList"),
        },
        f"{one}/items/{{item_id}}": {
            "parameters": [where, in_path("item_id")],
            "get": operation("An item", {"200": {"description": "the item", "content": item}, **wrong}),
            "delete": operation("Remove an item", {"200": json_answer("the conversation", "Conversation"), **wrong}),
        },
    }


def _responses() -> dict[str, Any]:
    where = in_path("response_id")
    wrong = {status: json_answer(text, "ErrorAnswer") for status, text in ERRORS.items() if status in ("400", "404", "503")}
    one = "/v1/responses/{response_id}"
    return {
        "/v1/responses": {"post": generation("Answer items with items", "ResponsesRequest", "ResponseAnswer")},
        "/v1/responses/input_tokens": {
            "post": generation("Count a prompt", "InputTokensRequest", "InputTokens", streams=False)
        },
        "/v1/responses/compact": {
            "post": generation("Compact a conversation", "CompactRequest", "CompactedAnswer", streams=False)
        },
        one: {
            "parameters": [where],
            "get": {
                "parameters": [
                    {"name": "stream", "in": "query", "schema": {"type": "boolean"}},
                    {"name": "starting_after", "in": "query", "schema": {"type": "integer", "minimum": 0}},
                ],
                **operation("A stored response, or its events", {"200": streamed("ResponseAnswer"), **wrong}),
            },
            "delete": operation("Forget a stored response", {"200": json_answer("it is gone", "DeletedResponse"), **wrong}),
        },
        f"{one}/input_items": {
            "parameters": [where, *PAGE],
            "get": operation("The items it answered", {"200": json_answer("a page of them", "ItemList"), **wrong}),
        },
        f"{one}/cancel": {
            "parameters": [where],
            "post": operation("Stop one in the background", {"200": json_answer("the response", "ResponseAnswer"), **wrong}),
        },
    }


SERVER_TYPES: tuple[type[msgspec.Struct], ...] = (CancelledRequest, Welcome)


def server_paths() -> dict[str, Any]:
    return {**_requests(), **_server()}


def _requests() -> dict[str, Any]:
    return {
        "/v1/requests/{id}": {
            "parameters": [in_path("id")],
            "delete": operation(
                "End a running request",
                {
                    "200": json_answer("it was running and is ended", "CancelledRequest"),
                    "404": json_answer("no such request is running", "ErrorAnswer"),
                    "503": json_answer("not every frontend could be asked", "ErrorAnswer"),
                },
            ),
        },
        "/v1/streams/{job}": {
            "parameters": [in_path("job")],
            "get": operation(
                "Follow a durable stream",
                {
                    "200": {"description": "its events", "content": {"text/event-stream": {"schema": {"type": "string"}}}},
                    "400": json_answer("Last-Event-ID is of no event of it", "ErrorAnswer"),
                    "404": json_answer("there is no such job", "ErrorAnswer"),
                    "410": json_answer("its events are not stored any more", "ErrorAnswer"),
                },
            ),
        },
    }


def _server() -> dict[str, Any]:
    page = {"description": "a page", "content": {"text/html": {"schema": {"type": "string"}}}}
    welcome = json_answer("what this server is", "Welcome")
    welcome["content"] |= page["content"]
    plain = {"200": {"description": "healthy"}, "503": {"description": "unhealthy"}}
    return {
        "/": {"get": operation("What this server is", {"200": welcome})},
        "/docs": {"get": operation("This document as a page", {"200": page})},
        "/health": {"get": operation("What is up", states("healthy", "unhealthy"))},
        "/ready": {
            "parameters": [{"name": "of", "in": "query", "schema": {"type": "string", "enum": ["frontend"]}}],
            "get": operation("Whether some model can answer now, or requests are taken", states("ready", "not ready")),
        },
        "/live": {"get": operation("Whether the process runs", {"200": {"description": "it does"}})},
        "/ping": {"get": operation("Health as a status alone", plain), "post": operation("Health as a status alone", plain)},
        "/load": {
            "get": operation("How many requests use an engine or wait for one", some_object("the count, as `server_load`"))
        },
        "/version": {"get": operation("The version of this server", some_object("the version"))},
        "/metrics": {
            "get": operation("Prometheus metrics", {"200": {"description": "text format", "content": {"text/plain": {}}}})
        },
        "/openapi.json": {"get": operation("This document", {"200": {"description": "OpenAPI 3.1"}})},
    }


TOKENS_TYPES: tuple[type[msgspec.Struct], ...] = (
    TokenGenerationRequest,
    TokenGenerationAnswer,
    TextGenerationAnswer,
    TokenizeRequest,
    TokenizeAnswer,
    DetokenizeRequest,
    DetokenizeAnswer,
)


def tokens_paths() -> dict[str, Any]:
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


TRANSCRIPTIONS_TYPES = TRANSCRIPTIONS_SCHEMAS

_FIELDS: dict[str, Any] = {
    "file": {"type": "string", "format": "binary"},
    "model": {"type": "string"},
    "prompt": {"type": "string", "maxLength": 4096},
    "response_format": {"type": "string", "enum": ["json", "text"]},
    "temperature": {"type": "number", "minimum": 0, "maximum": 1},
    "stream": {"type": "boolean"},
}


def transcriptions_paths() -> dict[str, Any]:
    def asking(summary: str, fields: dict[str, Any]) -> dict[str, Any]:
        schema = {"type": "object", "required": ["file"], "properties": fields}
        answer = json_answer("the text; with `stream` server-sent events", "Transcript")
        answer["content"]["text/plain"] = {"schema": {"type": "string"}}
        answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
        return {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}},
                "responses": {"200": answer} | {status: json_answer(text, "ErrorAnswer") for status, text in ERRORS.items()},
            }
        }

    return {
        "/v1/audio/transcriptions": asking("Transcribe speech", _FIELDS | {"language": {"type": "string"}}),
        "/v1/audio/translations": asking("Translate speech into English", _FIELDS),
    }


VIDEOS_TYPES = VIDEOS_SCHEMAS


def videos_paths() -> dict[str, Any]:
    schema = {"schema": {"$ref": "#/components/schemas/VideoRequest"}}
    stored = stored_errors()
    errors = {status: json_answer(text, "ErrorAnswer") for status, text in ERRORS.items()}
    file = {"video/mp4": {"schema": {"type": "string", "format": "binary"}}}
    variant = {"name": "variant", "in": "query", "schema": {"type": "string", "enum": ["video"]}}
    gone = {**stored["400"], "description": "the file is not stored any more"}
    return {
        "/v1/videos": {
            "post": {
                "summary": "Make a video of a prompt",
                "requestBody": {"required": True, "content": {"application/json": schema, "multipart/form-data": schema}},
                "responses": {"200": json_answer("the video as it stands", "VideoObject")} | errors,
            },
            "get": {"summary": "List videos", "parameters": PAGE}
            | {"responses": {"200": json_answer("a page of videos", "VideoList")} | stored},
        },
        "/v1/videos/{id}": {
            "parameters": [in_path("id")],
            "get": {"summary": "A video"} | {"responses": {"200": json_answer("the video", "VideoObject")} | stored},
            "delete": {"summary": "Delete a video"}
            | {"responses": {"200": json_answer("the deleted video", "DeletedVideo")} | stored},
        },
        "/v1/videos/{id}/content": {
            "parameters": [in_path("id"), variant],
            "get": {
                "summary": "The file of a video",
                "responses": {"200": {"description": "the file", "content": file}, "410": gone} | stored,
            },
        },
    }


# The types and the paths of each API, in the order of the document.
_APIS = (
    (CHATS_TYPES, chats_paths),
    (RESPONSES_TYPES, responses_paths),
    (MESSAGES_TYPES, messages_paths),
    (POOLING_TYPES, pooling_paths),
    (IMAGES_TYPES, images_paths),
    (VIDEOS_TYPES, videos_paths),
    (TRANSCRIPTIONS_TYPES, transcriptions_paths),
    (TOKENS_TYPES, tokens_paths),
    (OLLAMA_TYPES, ollama_paths),
    (SERVER_TYPES, server_paths),
)


@cache
def build_openapi() -> bytes:
    """Return the OpenAPI 3.1 document as JSON."""
    every: list[Any] = [one for types, _ in _APIS for one in types]
    every += [*FILE_SCHEMAS, *BATCH_SCHEMAS]
    _, components = msgspec.json.schema_components(every, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for _, of_api in _APIS:
        paths |= of_api()
    paths |= file_paths(stored_errors())
    paths |= batch_paths(stored_errors())
    info = {"title": "Headrace", "version": metadata.version("headrace"), "description": "LLM serving over NATS JetStream"}
    document = {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}
    return msgspec.json.encode(document)
