"""Images, videos and sounds in prompts: which blocks they touch, and so which blocks and answers they change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from broker.blocks import MediaSpan
from workers.errors import RequestInvalid

MEDIA_KINDS = ("image", "video", "audio")


class _Item(msgspec.Struct, frozen=True, kw_only=True):
    kind: Literal["image", "video", "audio"]
    digest: int
    start: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=1)]


def parse_media(items: Sequence[Mapping[str, Any]], prompt_tokens: int) -> tuple[MediaSpan, ...]:
    """The items of a prompt: `kind`, `digest` (u64 of the content), and `start` and `length` of the placeholder tokens.

    Further fields are ignored.  Raises RequestInvalid when one is missing or wrong, or an item lies outside of the prompt.
    """
    spans = []
    for number, given in enumerate(items):
        try:
            item = msgspec.convert(given, _Item)
        except msgspec.ValidationError as error:
            raise RequestInvalid(f"media item {number}: {error}", param="media") from None
        if not 0 <= item.digest < 1 << 64:
            raise RequestInvalid(f"media item {number}: digest {item.digest} is not an unsigned 64-bit number", param="media")
        if item.start + item.length > prompt_tokens:
            raise RequestInvalid(
                f"media item {number}: tokens {item.start} to {item.start + item.length} of a prompt of {prompt_tokens}",
                param="media",
            )
        spans.append(MediaSpan(item.start, item.length, item.digest))
    return tuple(spans)


def media_keys(spans: Sequence[MediaSpan], start: int, size: int) -> tuple[tuple[int, int], ...]:
    """(digest, offset) of each item that touches the block of `size` tokens at token `start`; see `broker.blocks`."""
    return tuple(
        (span.digest, max(0, span.start - start))
        for span in spans
        if span.start < start + size and span.start + span.length > start
    )
