"""Stores answers of the Responses API, so that any ingress can serve them and continue from them.

An answer holds its own turn (the client's input and the model's output) and the ids of all turns before it.  So storing a turn
costs only its own bytes, and a conversation of any length is read in two steps: its last turn, then all the others at once.

The answers are in the object store `<prefix>_responses`, each with its own time to live.  When the store is full the oldest
ones of the tenant that has the most are removed (`store_room.py`); an answer that lost its first turns in this way cannot be
continued.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from headrace.broker.codec import encode
from headrace.broker.errors import ResponseNotStored, ResponseUnknown
from headrace.broker.ingress.store_room import Held, Place, StoreRoom
from headrace.broker.messages import Record
from headrace.jetstream.errors import JetStreamError, ObjectCorrupt, ObjectNotFound
from headrace.jetstream.objects.layout import CHUNK, ObjectInfo, ObjectSubjects
from headrace.jetstream.ports import Messaging, StoredMessage
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()

READS_AT_ONCE = 16
FORGET_DELETED_S = 60.0
DAY_S = 86_400.0
TENANT = "headrace-tenant"  # the key of the description's metadata
MESSAGE_BYTES = 256  # of the stream, beside the content of a message: subject, headers, what the server keeps with it
DESCRIPTION_BYTES = 512

Item = dict[str, Any]


class StoredResponse(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A turn of a conversation. `answer` is the JSON that clients get; `input` and `output` are JSON lists of items.

    `chain` has the ids of the turns before, oldest first; `chain_bytes` is the size of all their items together.
    """

    id: str
    tenant: str = "_"
    created: float = 0.0
    answer: bytes = b""
    input: bytes = b"[]"
    output: bytes = b"[]"
    chain: list[str] = []
    chain_bytes: int = 0
    before: bytes = b""  # of one in the background on a conversation that is still made: its items, compressed with zlib
    judge: str = ""  # the ingress that is still generating it; empty = it has ended
    job: str = ""  # the stored job that makes it, by its token; its result is the last word on how it ended
    events: bytes = b""  # of a background response: all events as they were sent, compressed with zlib

    @property
    def item_bytes(self) -> int:
        """The size of this turn's items."""
        return len(self.input) + len(self.output)

    def items(self) -> list[Item]:
        """Return the items that this turn adds to the conversation."""
        return [*msgspec.json.decode(self.input, type=list[Item]), *msgspec.json.decode(self.output, type=list[Item])]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Limits of the store. `max_bytes` is the largest size of one turn."""

    ttl_s: float = 30 * DAY_S
    max_bytes: int = 8 * 1024 * 1024
    write_timeout_s: float = 2.0
    read_timeout_s: float = 5.0


class ResponseStore:
    """Reads and writes stored responses. It caches none."""

    def __init__(self, messaging: Messaging, subjects: Subjects, limits: StoreLimits | None = None) -> None:
        bucket = subjects.bucket("responses")
        described = ObjectSubjects(bucket)
        self._objects = messaging.objects(bucket)
        self._limits = limits or StoreLimits()
        self.room = StoreRoom(
            messaging, Place("responses", described.stream, described.all_descriptions, described_answer, self._remove)
        )

    async def put(self, response: StoredResponse) -> None:
        """Store a response, within the write timeout. Raises ResponseNotStored."""
        limits = self._limits
        data = encode(response)
        if len(data) > limits.max_bytes:
            message = f"the response takes {len(data)} bytes; the limit is {limits.max_bytes}"
            raise ResponseNotStored(message, reason="too_large")
        try:
            async with (
                asyncio.timeout(limits.write_timeout_s),
                self.room.reserve(stored_size(len(data))),
                self._objects.writer(response.id, ttl_s=limits.ttl_s) as writer,
            ):
                await writer.write(data)
                await writer.commit(metadata={TENANT: response.tenant})
        except TimeoutError:
            raise ResponseNotStored(f"not stored within {limits.write_timeout_s:g} s", reason="timeout") from None
        except JetStreamError as error:
            raise ResponseNotStored(str(error), reason="unavailable") from error

    async def get(self, response_id: str, tenant: str) -> StoredResponse:
        """Return a response of this tenant. Raises ResponseUnknown, and a JetStreamError if the store cannot be reached."""
        try:
            data = await self._objects.get(response_id, timeout_s=self._limits.read_timeout_s)
            response = msgspec.msgpack.decode(data, type=StoredResponse)
        except ObjectNotFound:
            raise ResponseUnknown(response_id) from None
        except (ObjectCorrupt, msgspec.MsgspecError) as error:
            log.warning("stored_response.damaged", response=response_id, error=str(error))
            raise ResponseUnknown(response_id) from error
        if response.tenant != tenant:
            raise ResponseUnknown(response_id)
        return response

    async def get_all(self, response_ids: Sequence[str], tenant: str) -> list[StoredResponse]:
        """Return several responses, in the order of their ids. Raises as `get` does, for the first that fails."""
        gate = asyncio.Semaphore(READS_AT_ONCE)

        async def one(response_id: str) -> StoredResponse:
            async with gate:
                return await self.get(response_id, tenant)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(response_id)) for response_id in response_ids]
        except BaseExceptionGroup as failed:
            raise _first(failed) from None
        return [task.result() for task in tasks]

    async def delete(self, response_id: str, tenant: str) -> None:
        """Delete a response of this tenant. Raises as `get` does."""
        await self.get(response_id, tenant)
        await self._remove(response_id)

    async def _remove(self, response_id: str) -> None:
        await self._objects.delete(response_id, ttl_s=FORGET_DELETED_S)


def stored_size(size: int) -> int:
    """Return what an answer of so many bytes takes in the stream, about."""
    return size + DESCRIPTION_BYTES + MESSAGE_BYTES * (1 + -(-size // CHUNK))


def described_answer(message: StoredMessage) -> Held | None:
    """Return whose answer a description is of, None for one that cannot be read.

    Those that were stored before descriptions named the tenant are of one tenant without a name.
    """
    try:
        info = msgspec.json.decode(message.data, type=ObjectInfo)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return Held(info.name, None if info.deleted else info.metadata.get(TENANT, ""), stored_size(info.size))


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
