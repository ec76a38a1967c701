"""Stored objects: records of chat completions, and the requests and answers of the routes over them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.frontend.schema.answers import UNSET, UnsetType, Usage
from headrace.frontend.schema.common import MetadataKey, MetadataValue

Metadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)]


class Page(msgspec.Struct, kw_only=True):
    """A page of stored objects: those from `first_id` to `last_id`."""

    object: Literal["list"] = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool


class ExpiresAfter(msgspec.Struct, kw_only=True):
    """The life of a file, from its creation on."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)]


class ChatRecord(msgspec.Struct, kw_only=True):
    """The fields of a stored completion that lists and filters need."""

    id: str
    created: int
    model: str
    metadata: dict[str, str] = {}


class MetadataChange(msgspec.Struct, kw_only=True):
    """New metadata for a stored object; null removes it."""

    metadata: Metadata | None


class StoredChat(msgspec.Struct, kw_only=True):
    """A stored chat completion, as it was answered, with its metadata."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    service_tier: str | None = None
    choices: list[dict[str, Any]]
    usage: Usage
    metadata: dict[str, str] = {}
    prompt_logprobs: list[Any] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


class ChatList(Page, kw_only=True):
    """A page of stored completions."""

    data: list[StoredChat]


class DeletedChat(msgspec.Struct, kw_only=True):
    """The answer to the deletion of a stored completion."""

    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: bool = True


class StoredMessage(msgspec.Struct, kw_only=True):
    """A message that a stored completion answers. Content in parts is in `content_parts`."""

    id: str
    role: str
    content: str | None
    content_parts: list[dict[str, Any]] | None
    name: str | None
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET


class ChatMessageList(Page, kw_only=True):
    """A page of the messages of a stored completion."""

    data: list[StoredMessage]
