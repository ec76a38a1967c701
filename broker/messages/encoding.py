"""Defines the messages by which a serving worker has an encode worker run the encoder of a multimodal model.

    serving ── EncodeMedia ──▶ encode      one media item of a request; a core request to the worker's subject for peers
    serving ◀── MediaEncoded ── encode     the embeddings lie in the object store `<prefix>_embeddings`, or why not

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

    `name`: the object under which its embeddings are to lie, which follows from the item (`workers/encoding/names.py`).
    """

    id: JobId
    name: ObjectDigest
    item: Count = 0
    payload: bytes = b""
    spill: Spill | None = None


class MediaEncoded(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The answer of an encode worker: the object is there, or not and why."""

    ok: bool
    message: Name = ""
