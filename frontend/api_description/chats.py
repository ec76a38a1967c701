"""Describes the routes of chats, completions and models."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.frontend.anthropic.models import AnthropicModel, AnthropicModelList
from headrace.frontend.api_description.operations import (
    PAGE,
    changing,
    either,
    generation,
    in_path,
    json_answer,
    operation,
    stored_errors,
)
from headrace.frontend.schema.answers import ChatAnswer, CompletionAnswer, ErrorAnswer, ModelEntry, ModelList
from headrace.frontend.schema.chat import ChatRequest
from headrace.frontend.schema.completions import CompletionRequest
from headrace.frontend.schema.stored import ChatList, ChatMessageList, DeletedChat, MetadataChange, StoredChat, StoredMessage

TYPES: tuple[type[msgspec.Struct], ...] = (
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


def paths() -> dict[str, Any]:
    """Return the paths of OpenAI's chats, stored completions, plain completions and models."""
    completions = generation("Continue one or more prompts", "CompletionRequest", "CompletionAnswer")
    return {**_chats(), "/v1/completions": {"post": completions}, **_models()}


def _chats() -> dict[str, Any]:
    """Return the paths of chats and of stored completions."""
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
