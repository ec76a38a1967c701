"""Reads the conversation that a request continues: earlier turns by `previous_response_id`, single items by reference."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.broker.errors import ResponseUnknown
from headrace.broker.ingress.response_store import StoredResponse
from headrace.frontend.errors import BadRequest
from headrace.frontend.http.field_checks import text_at
from headrace.frontend.ports import ResponsePort
from headrace.frontend.responses.item_forms import item_name
from headrace.frontend.responses.items import kind_of, user_item

_ITEM_ID = re.compile(r"[a-z]{1,8}_(?P<job>[0-9a-f]{8,64})_(?P<place>i?[0-9]{1,9})\Z")

RESPONSE_PREFIX = "resp_"
MAX_REFERENCES = 256

Item = dict[str, Any]


class PreviousUnknown(BadRequest, code="previous_response_not_found"):
    """The response to be continued is not stored."""


class StillMade(BadRequest, code="response_in_progress"):
    """The response to be continued has not ended."""


class TooLong(BadRequest, code="conversation_too_long"):
    """The conversation has too many turns, or they are too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The conversation before a request. `chain` has the ids of its turns, `size` the bytes of its items as JSON."""

    items: list[Item] = field(default_factory=list)
    chain: list[str] = field(default_factory=list)
    size: int = 0


class History:
    """Reads conversations from the store, within limits. `store` None = nothing is stored."""

    def __init__(self, store: ResponsePort | None, *, max_turns: int, max_bytes: int) -> None:
        self._store = store
        self._max_turns = max_turns
        self._max_bytes = max_bytes

    async def before(self, previous: str | None, tenant: str) -> Past:
        """Read the conversation up to a response.

        Raises PreviousUnknown, StillMade, TooLong, and a JetStreamError if the store cannot be reached.
        """
        if previous is None:
            return Past()
        last = await self._get(previous, tenant, previous)
        if last.judge:
            raise StillMade(
                f"response {previous!r} is still being made and cannot be continued yet", param="previous_response_id"
            )
        turns = len(last.chain) + 1
        if turns > self._max_turns:
            raise self._too_long(f"{turns} turns, the limit is {self._max_turns}")
        size = last.chain_bytes + last.item_bytes
        if size > self._max_bytes:
            raise self._too_long(f"{size} bytes of items, the limit is {self._max_bytes}")
        store = self._store
        assert store is not None  # noqa: S101  # `_get` has read from it
        try:
            earlier = await store.get_all(last.chain, tenant)
        except ResponseUnknown as error:
            raise _unknown(previous, error.response_id) from None
        items: list[Item] = []
        for turn in (*earlier, last):
            items += turn.items()
            await asyncio.sleep(0)  # decoding a long turn blocks the event loop for a while
        return Past(items=items, chain=[*last.chain, last.id], size=size)

    async def items(self, given: str | Sequence[Item], past: Past, tenant: str) -> list[Item]:
        """Return the request's own items, with references replaced by their items. Raises BadRequest."""
        if isinstance(given, str):
            return [user_item(given)]
        references = [i for i, item in enumerate(given) if kind_of(item, f"input[{i}]") == "item_reference"]
        if not references:
            return list(given)
        if len(references) > MAX_REFERENCES:
            raise BadRequest(f"at most {MAX_REFERENCES} item references, got {len(references)}", param="input")
        items = list(given)
        known = {item["id"]: item for item in past.items if "id" in item}
        for i in references:
            name = text_at(given[i], "id", f"input[{i}]")
            if name not in known:
                known |= await self._around(name, tenant)
            if name not in known:
                param = f"input[{i}].id"
                raise BadRequest(f"{param}: there is no stored item {name[:100]!r}", param=param, code="item_not_found")
            items[i] = known[name]
        return items

    async def _around(self, name: str, tenant: str) -> dict[str, Item]:
        """Return all items of the turn that an item's id names."""
        match = _ITEM_ID.match(name)
        if match is None or self._store is None:
            return {}
        try:
            turn = await self._store.get(RESPONSE_PREFIX + match["job"], tenant)
        except ResponseUnknown:
            return {}
        return {item["id"]: item for item in turn.items() if "id" in item}

    async def _get(self, response_id: str, tenant: str, asked: str) -> StoredResponse:
        if self._store is None or not response_id.startswith(RESPONSE_PREFIX):
            raise _unknown(asked, response_id)
        try:
            return await self._store.get(response_id, tenant)
        except ResponseUnknown:
            raise _unknown(asked, response_id) from None

    @staticmethod
    def _too_long(what: str) -> TooLong:
        message = f"the conversation before this request has {what}; start a new one and send what matters as input"
        return TooLong(message, param="previous_response_id")


def _unknown(asked: str, missing: str) -> PreviousUnknown:
    which = "" if asked == missing else f" (of its turns {missing!r} is gone)"
    return PreviousUnknown(
        f"previous response {asked!r} cannot be continued: it is not stored{which}", param="previous_response_id"
    )


def packed_items(past: Past) -> bytes:
    """Return the items of a conversation as a record keeps them."""
    return zlib.compress(msgspec.json.encode(past.items), level=1)


def kept_past(record: StoredResponse) -> Past | None:
    """Return the conversation that a record keeps, None for one that keeps none."""
    if not record.before:
        return None
    items = msgspec.json.decode(zlib.decompress(record.before), type=list[Item])
    return Past(items=items, chain=record.chain, size=record.chain_bytes)


def named_items(items: Sequence[Item], job_id: str) -> bytes:
    """Return a request's items as JSON for the store, each with an id."""
    named = [item if item.get("id") else {**item, "id": item_name(item, job_id, f"i{i}")} for i, item in enumerate(items)]
    return msgspec.json.encode(named)
