"""OpenAI's chat and text completions: their routes, stored or durable, and their part of the OpenAPI document."""

from __future__ import annotations

from typing import Any

from headrace.frontend.answer_schema import (
    ChatAnswer,
    ChatList,
    ChatMessageList,
    CompletionAnswer,
    DeletedChat,
    ErrorAnswer,
    MetadataChange,
    StoredChat,
    StoredMessage,
)
from headrace.frontend.apis import HttpApi, Site
from headrace.frontend.chat_schema import ChatRequest, CompletionRequest
from headrace.frontend.durable_api import DurableApi
from headrace.frontend.openai.chat import ChatApi, CompletionApi
from headrace.frontend.openai.stored_chats import StoredChatRoutes, StoredChats
from headrace.frontend.openapi import PAGE, changing, generation, in_path, json_answer, operation, stored_errors


def chat_api(site: Site) -> ChatApi:
    """Return the API of chats, into which others translate their requests."""
    return site.shared(ChatApi, lambda: ChatApi(site.model_cache, site.settings, site.metrics, _stored(site)))


def _stored(site: Site) -> StoredChats | None:
    responses, records = site.stores.responses, site.stores.records
    if responses is None or records is None:
        return None
    return site.shared(StoredChats, lambda: StoredChats(responses, records, site.metrics))


def _mount(site: Site) -> None:
    jobs = site.stores.jobs
    for path, api in (
        ("/v1/chat/completions", chat_api(site)),
        ("/v1/completions", CompletionApi(site.model_cache, site.settings)),
    ):
        able = DurableApi(api, path, jobs, site.models, site.settings, site.metrics) if jobs is not None else api
        site.generate(path, able, job=api)
    site.routes += StoredChatRoutes(_stored(site), site.settings).routes()


def _paths() -> dict[str, Any]:
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
        "/v1/completions": {"post": generation("Continue one or more prompts", "CompletionRequest", "CompletionAnswer")},
    }


API = HttpApi(
    mount=_mount,
    paths=_paths,
    types=(
        ChatRequest,
        CompletionRequest,
        ChatAnswer,
        CompletionAnswer,
        ErrorAnswer,
        StoredChat,
        ChatList,
        DeletedChat,
        StoredMessage,
        ChatMessageList,
        MetadataChange,
    ),
)
