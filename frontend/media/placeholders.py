"""Expands the placeholder tokens of a prompt: each becomes as many tokens as its item takes in the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.broker.blocks import MediaSpan
from headrace.broker.models.cards import MediaSlot
from headrace.frontend.errors import BadRequest
from headrace.frontend.media.loader import MediaItem


@dataclass(frozen=True, slots=True)
class Placed:
    """A prompt with expanded placeholders. The first `known` ids are those that the engine will see."""

    ids: list[int]
    spans: list[MediaSpan]
    media: list[dict[str, Any]]  # in the form of `Generation.media`
    known: int


def place(ids: Sequence[int], items: Sequence[MediaItem], slots: Mapping[str, MediaSlot]) -> Placed:
    """Expand the placeholders. Raises BadRequest unless the prompt has one per item, of the same kind and in the same order."""
    tokens = {slots[kind].token: kind for kind in dict.fromkeys(item.kind for item in items)}
    expanded: list[int] = []
    spans: list[MediaSpan] = []
    media: list[dict[str, Any]] = []
    known = -1
    taken = 0
    start = 0
    for at, token in enumerate(ids):
        kind = tokens.get(token)
        if kind is None:
            continue
        expanded += ids[start:at]
        start = at + 1
        if taken == len(items) or items[taken].kind != kind:
            raise _mismatch(items, slots)
        item = items[taken]
        taken += 1
        length = slots[kind].tokens or 1
        if not slots[kind].tokens and known < 0:
            known = len(expanded)
        spans.append(MediaSpan(len(expanded), length, item.digest))
        media.append(_record(item, len(expanded), length))
        expanded += slots[kind].ids or [token] * length
    if taken != len(items):
        raise _mismatch(items, slots)
    expanded += ids[start:]
    return Placed(expanded, spans, media, len(expanded) if known < 0 else known)


def _record(item: MediaItem, start: int, length: int) -> dict[str, Any]:
    return {
        "kind": item.kind,
        "digest": item.digest,
        "content": item.content,
        "start": start,
        "length": length,
        "type": item.media_type,
        "data": item.data,
        "param": item.param,
    }


def _mismatch(items: Sequence[MediaItem], slots: Mapping[str, MediaSlot]) -> BadRequest:
    texts = ", ".join(dict.fromkeys(slots[item.kind].text for item in items))
    return BadRequest(
        f"the prompt does not have one placeholder for each of the {len(items)} media items: texts of messages must not have "
        f"{texts} in them, and the chat template must show every item",
        param="messages",
        code="media_placeholders",
    )
