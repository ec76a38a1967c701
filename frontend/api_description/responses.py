"""Describes the routes of the Responses API and of conversations."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.frontend.api_description.operations import (
    ERRORS,
    PAGE,
    changing,
    generation,
    in_path,
    json_answer,
    operation,
    stored_errors,
    streamed,
)
from headrace.frontend.responses.answer import CompactedAnswer, DeletedResponse, InputTokens, ItemList, ResponseAnswer
from headrace.frontend.responses.conversation_schema import AddedItems, Conversation, DeletedConversation, NewConversation
from headrace.frontend.responses.schema import CompactRequest, InputTokensRequest, ResponsesRequest

TYPES: tuple[type[msgspec.Struct], ...] = (
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


def paths() -> dict[str, Any]:
    """Return the paths of responses and conversations."""
    return {**_conversations(), **_responses()}


def _conversations() -> dict[str, Any]:
    """Return the paths of conversations."""
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
    """Return the paths of the Responses API."""
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
