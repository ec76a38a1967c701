"""Defines the messages by which a serving worker has an encode worker run the encoder of a multimodal model.

    serving ── EncodeMedia ──▶ encode      one media item of a request; a core request to the worker's subject for peers
    serving ◀── MediaEncoded ── encode     where the embeddings are to be read, or why they are not there

They lie in memory of the encode worker that the asker reads over NIXL, if both can, or in the object store
`<prefix>_embeddings-<pool>`.

Nothing here decides about a request: without embeddings its worker runs the encoder itself.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from headrace.broker.messages.base import Count, JobId, Name, Record
from headrace.broker.messages.requests import Spill

ObjectDigest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class EncodeMedia(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="encode_media"):
    """A media item to encode: number `item` of the `Generation` in `payload` (or `spill`).

    `name`: the name under which its embeddings are to lie, which follows from the item (`workers/encoding/names.py`).
    `reads`: the most bytes that the asker reads over NIXL at once, 0 where it cannot.
    """

    id: JobId
    name: ObjectDigest
    item: Count = 0
    payload: bytes = b""
    spill: Spill | None = None
    reads: Count = 0


class LentRecord(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A record in memory of an encode worker: `size` bytes from block `first` of the agent with this card.

    It may be overwritten at any time; a reader finds that out by the record's checksum.
    """

    card: bytes
    first: Count
    size: Count


class MediaEncoded(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The answer of an encode worker: the embeddings are there, or not and why. Without `lent` they are in the object store."""

    ok: bool
    message: Name = ""
    lent: LentRecord | None = None
