"""Images, videos and sounds in prompts, and the blocks (and so the answers) that they change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec

from headrace.broker.blocks import MediaSpan
from headrace.broker.models.cards import MediaSlot
from headrace.workers.errors import RequestInvalid
from headrace.workers.prompt_embeds import StoredTensor
from headrace.workers.text.tokens import TokenTable

MEDIA_KINDS = ("image", "video", "audio")
PLACEHOLDERS = {"image": "<filename>", "video": "<file_sep>", "audio": "<empty_output>"}
"""Special tokens of the bundled tokenizer that no chat has in it: stand-ins for those of a model made for media."""


class _Item(msgspec.Struct, frozen=True, kw_only=True):
    kind: Literal["image", "video", "audio"]
    digest: int
    start: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=1)]


def parse_media(items: Sequence[Mapping[str, Any]], prompt_tokens: int) -> tuple[MediaSpan, ...]:
    """Read the items of a prompt: `kind`, `digest` (u64 of the content), and `start` and `length` of the placeholder tokens.

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


def embeds_media(tensor: StoredTensor, prompt_tokens: int) -> tuple[MediaSpan, ...]:
    """Treat a prompt given as embeddings like an item that takes up the whole prompt."""
    if tensor.shape[0] != prompt_tokens:
        raise RequestInvalid(f"prompt_embeds has {tensor.shape[0]} rows for {prompt_tokens} tokens", param="prompt_embeds")
    digest = int.from_bytes(blake2b(tensor.data, person=tensor.dtype.encode(), digest_size=8).digest(), "little")
    return (MediaSpan(0, prompt_tokens, digest),)


def media_keys(spans: Sequence[MediaSpan], start: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return (digest, offset) of each item that touches the block of `size` tokens at `start`; see `headrace.broker.blocks`."""
    return tuple(
        (span.digest, max(0, span.start - start))
        for span in spans
        if span.start < start + size and span.start + span.length > start
    )


def media_slots(table: TokenTable, tokens: int) -> dict[str, MediaSlot]:
    """Describe items in prompts: `tokens` each, of the kinds whose placeholder the tokenizer knows; with 0 there are none."""
    ids = {table.token_bytes(token): token for token in table.special} if tokens else {}
    known = {kind: ids.get(text.encode()) for kind, text in PLACEHOLDERS.items()}
    return {kind: MediaSlot(PLACEHOLDERS[kind], token, tokens) for kind, token in known.items() if token is not None}
