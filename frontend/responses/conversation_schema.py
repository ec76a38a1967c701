"""Conversations: their records, and the requests and answers of the routes over them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.frontend.schema.stored import Metadata

MAX_NEW_ITEMS = 20  # in one request, as OpenAI has it

NewItems = Annotated[list[dict[str, Any]], Meta(max_length=MAX_NEW_ITEMS)]


class ItemBatch(msgspec.Struct, kw_only=True):
    """Items that were added together. `name` is that of their object in the store, `items` the ids of those still there."""

    name: str
    items: list[str]
    size: int  # bytes of all its items as JSON


class ConversationRecord(msgspec.Struct, kw_only=True):
    """A conversation: what is small of it, and where its items are, in their order."""

    id: str
    created_at: int
    metadata: dict[str, str] = {}
    batches: list[ItemBatch] = []

    @property
    def size(self) -> int:
        """The bytes of all batches."""
        return sum(batch.size for batch in self.batches)

    @property
    def item_ids(self) -> list[str]:
        """The ids of all items in their order."""
        return [name for batch in self.batches for name in batch.items]


class NewConversation(msgspec.Struct, kw_only=True):
    """A conversation to be created."""

    items: NewItems | None = None
    metadata: Metadata | None = None


class AddedItems(msgspec.Struct, kw_only=True):
    """Items to be added to a conversation."""

    items: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_NEW_ITEMS)]


class Conversation(msgspec.Struct, kw_only=True):
    """A conversation, as routes answer it."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(msgspec.Struct, kw_only=True):
    """The answer to the deletion of a conversation."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True
