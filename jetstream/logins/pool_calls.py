"""Makes calls for logins that may make them for their own pool only: the server's calls name a stream, and all pools share it.

A steward looks at what a call touches, a message or a consumer, before it makes the call or gives the answer away
(`headrace.jetstream.logins.steward`).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.jetstream.core.api import JsApi
from headrace.jetstream.core.origin import SubjectPattern
from headrace.jetstream.logins.permissions import Permissions

PAGE = 256  # consumers in one answer, as the server has it

READ, DELETE = "STREAM.MSG.GET", "STREAM.MSG.DELETE"
LIST, DROP = "CONSUMER.LIST", "CONSUMER.DELETE"
LOOK = "STREAM.INFO"

_CALL = re.compile(r"[A-Za-z0-9_~.-]+\Z")  # no wildcard, and nothing that could end the line of a command
_QUERY = frozenset({"seq", "next_by_subj"})
_LOOK = frozenset({"subjects_filter", "offset"})


InUse = Callable[[str], Awaitable[bool]]  # of a subject: it is another worker's, and that worker lives


async def unused(_subject: str) -> bool:
    """Return False: a login of all workers of a pool is each of them."""
    return False


class NotTheirs(Exception):
    """The call touches what is another pool's, or a living worker's, or is none that is made for others."""


class _Read(msgspec.Struct):
    subject: str


class _Answer(msgspec.Struct):
    message: _Read


class PoolCalls:
    """The calls that a steward makes for others, on the connection of an operator."""

    def __init__(self, api: JsApi) -> None:
        self._api = api

    async def make(self, allowed: Permissions, call: str, body: Any, *, in_use: InUse = unused) -> dict[str, Any]:
        """Make a call for a login with these permissions, and return the server's answer.

        What is `in_use` is not touched: a worker with a login of its own takes over the work of dead workers only.
        Raises NotTheirs, and ApiError or another JetStreamError as the call itself does.
        """
        if not _CALL.match(call) or not any(SubjectPattern(one).covers(call.encode()) for one in allowed.asked):
            raise NotTheirs(f"the role has no such call as {call[:256]}")
        if call.startswith(f"{LOOK}."):
            return await self._look(allowed.counted, call, body)
        reach = [SubjectPattern(one) for one in allowed.reach]
        name = ".".join(call.split(".")[: 3 if call.startswith("STREAM.") else 2])
        stream = call.removeprefix(f"{name}.").split(".")[0]
        if name == READ:
            return await self._read(reach, call, _query(body), in_use)
        if name == DELETE:
            await self._read(reach, f"{READ}.{stream}", {"seq": _query(body, more=frozenset({"no_erase"}))["seq"]}, in_use)
            return await self._api.call(call, body)
        if name == LIST:
            return await self._list(reach, call, body, in_use)
        if name == DROP:
            info = await self._api.call(call.replace(DROP, "CONSUMER.INFO", 1))
            if not await _within(reach, info, in_use):
                raise NotTheirs("the consumer is not one of its pool, or its worker lives")
            return await self._api.call(call)
        raise NotTheirs(f"{name} is not made for others")

    async def _look(self, counted: Sequence[str], call: str, body: Any) -> dict[str, Any]:
        """Describe a stream, with the subjects that were asked for if the login may know all of them."""
        query = {} if body is None else body
        if not isinstance(query, dict) or set(query) - _LOOK:
            raise NotTheirs("the body is no question for subjects")
        wanted = query.get("subjects_filter")
        if wanted is not None and not (isinstance(wanted, str) and any(_within_pattern(wanted, one) for one in counted)):
            raise NotTheirs(f"the role does not count the subjects {str(wanted)[:256]}")
        return await self._api.call(call, query or None)

    async def _read(self, reach: list[SubjectPattern], call: str, query: Mapping[str, Any], in_use: InUse) -> dict[str, Any]:
        answer = await self._api.call(call, query)
        subject = msgspec.convert(answer, _Answer).message.subject
        if not any(one.covers(subject.encode()) for one in reach):
            raise NotTheirs("the message is not one of its pool")
        if await in_use(subject):
            raise NotTheirs("the message is another worker's, which lives")
        return answer

    async def _list(self, reach: list[SubjectPattern], call: str, body: Any, in_use: InUse) -> dict[str, Any]:
        offset = body.get("offset", 0) if isinstance(body, dict) else 0
        if not isinstance(offset, int) or offset < 0:
            raise NotTheirs(f"the offset is {offset!r}")
        found: list[dict[str, Any]] = []
        seen = 0
        while True:
            page = await self._api.call(call, {"offset": seen})
            consumers = page.get("consumers") or []
            seen += len(consumers)
            found += [consumer for consumer in consumers if await _within(reach, consumer, in_use)]
            if not consumers or seen >= page.get("total", 0):
                break
        return {**page, "total": len(found), "offset": offset, "consumers": found[offset : offset + PAGE]}


def _query(body: Any, *, more: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the query for one message. Raises NotTheirs for one that has another form."""
    if not isinstance(body, dict) or not isinstance(body.get("seq"), int) or set(body) - _QUERY - more:
        raise NotTheirs("the body is no question for a message by its sequence")
    return body


def _within_pattern(wanted: str, pattern: str) -> bool:
    """Return True if a pattern covers every subject that another pattern covers."""
    if wanted.endswith(">") and not pattern.endswith(">"):
        return False
    return SubjectPattern(pattern).covers(wanted.encode())


async def _within(reach: list[SubjectPattern], info: Mapping[str, Any], in_use: InUse) -> bool:
    """Return True for a consumer that reads nothing but what the login reaches, and nothing that is in use."""
    config = info.get("config") or {}
    filters = config.get("filter_subjects") or [config.get("filter_subject") or ">"]
    if not all(any(one.covers(subject.encode()) for one in reach) for subject in filters):
        return False
    return not any([await in_use(subject) for subject in filters])
