"""Finds all that a deployment has stored of one tenant, in streams, buckets and object stores.

Most places name the tenant in a subject, a key or the name of an object.  Stored responses, dead letters and placements name
it in their content only, so those of all tenants are read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import msgspec

from headrace.broker.codec import NOT_DECODED, decode
from headrace.broker.errors import WireError
from headrace.broker.ingress.response_store import StoredResponse
from headrace.broker.keys.records import KeyRecord
from headrace.broker.keys.store import KeyStore
from headrace.broker.messages import DeadLetter, Envelope, Routed, Unreadable
from headrace.jetstream.errors import ObjectError, TopologyError
from headrace.jetstream.ports import Entry, Messaging, StoredMessage
from headrace.jetstream.subjects import Subjects, tenant_token
from headrace.jetstream.topology import AUDIT

PAGE = 1000  # messages that are read at once
READS_AT_ONCE = 8

STREAMS = {
    "JOB": "jobs",
    "REQ": "requests",
    "MOVED": "moved_requests",
    "RSP": "job_entries",
    "RESULT": "results",
    "QUOTA": "usage",
    "DLQ": "dead_letters",
    "ROUTE": "placements",
    "AUDIT": "audit_records",
}
BUCKETS = {
    "batches": ("batches", "{0}.*"),
    "files": ("files", "file.{0}.*"),
    "uploads": ("files", "upload.{0}.*"),
    "parts": ("files", "part.{0}.*.*"),
    "records": ("records", "*.{0}.*"),
}
OBJECTS = {"file_contents": ("files", "{0}/"), "large_results": ("results", "{0}."), "responses": ("responses", "")}
KINDS = ("keys", *STREAMS.values(), *BUCKETS, *OBJECTS)


@dataclass(frozen=True, slots=True)
class Place:
    """The stream of a kind of messages, and the filter that has all of the tenant's."""

    kind: str
    stream: str
    pattern: str
    is_theirs: Callable[[bytes], bool] | None = None  # None: all that the filter has are the tenant's
    on_demand: bool = False  # the stream need not be there


class TenantInventory:
    """All that is stored of one tenant, by kind."""

    def __init__(self, messaging: Messaging, subjects: Subjects, tenant: str) -> None:
        """`tenant` is its name, as keys and headers have it."""
        self.messaging = messaging
        self.subjects = subjects
        self.name = tenant
        self.tenant = tenant_token("" if tenant == "_" else tenant)
        named = subjects.of_tenant(self.tenant)
        self.places = [
            Place(STREAMS[kind], subjects.stream(kind), pattern, on_demand=kind == AUDIT) for kind, pattern in named.items()
        ]
        self.places.append(Place(STREAMS["DLQ"], subjects.stream("DLQ"), subjects.all_dead_letters(), self._of_letter))
        self.places.append(Place(STREAMS["ROUTE"], subjects.stream("ROUTE"), subjects.all_placements(), self._of_placement))
        self._keys = KeyStore(messaging, subjects)

    async def counts(self) -> dict[str, int]:
        """Return how many there are of each kind that has some. Raises JetStreamError."""
        found = dict.fromkeys(KINDS, 0)
        found["keys"] = len(await self.keys())
        for place in self.places:
            async for page in self.messages(place):
                found[place.kind] += len(page)
        for kind in BUCKETS:
            found[kind] = len(await self.entries(kind))
        for kind in OBJECTS:
            found[kind] = len(await self.objects(kind))
        return {kind: number for kind, number in found.items() if number}

    async def messages(self, place: Place) -> AsyncIterator[list[StoredMessage]]:
        """Read the tenant's messages of a stream page by page, oldest first. Raises JetStreamError."""
        start = 1
        if place.on_demand and not await self.is_there(place):
            return
        while page := await self.messaging.subject_messages(place.stream, place.pattern, limit=PAGE, start_seq=start):
            start = page[-1].seq + 1
            theirs = page if place.is_theirs is None else [message for message in page if place.is_theirs(message.data)]
            if theirs:
                yield theirs

    async def is_there(self, place: Place) -> bool:
        """Return whether the stream of a place has been made. Raises JetStreamError."""
        try:
            await self.messaging.stream_state(place.stream)
        except TopologyError:
            return False
        return True

    async def entries(self, kind: str) -> list[Entry]:
        """Read the tenant's entries of a bucket. Raises JetStreamError."""
        bucket, pattern = BUCKETS[kind]
        return await self.messaging.bucket(self.subjects.bucket(bucket)).entries(pattern.format(self.tenant))

    async def objects(self, kind: str) -> Sequence[str]:
        """Return the names of the tenant's objects of a kind. Raises JetStreamError."""
        bucket, prefix = OBJECTS[kind]
        store = self.messaging.objects(self.subjects.bucket(bucket))
        names = sorted(one.name for one in await store.list(prefix.format(self.tenant)))
        if kind != "responses":
            return names
        gate = asyncio.Semaphore(READS_AT_ONCE)

        async def is_theirs(name: str) -> bool:
            async with gate:
                response = await self.response(name)
                return response is not None and response.tenant == self.tenant

        async with asyncio.TaskGroup() as group:
            asked = [(name, group.create_task(is_theirs(name))) for name in names]
        return [name for name, answer in asked if answer.result()]

    async def response(self, name: str) -> StoredResponse | None:
        """Return a stored response, None for one that is gone or damaged. Raises JetStreamError."""
        with contextlib.suppress(ObjectError, *NOT_DECODED):
            data = await self.messaging.objects(self.subjects.bucket("responses")).get(name)
            return msgspec.msgpack.decode(data, type=StoredResponse)
        return None

    async def keys(self) -> list[KeyRecord]:
        """Return the tenant's keys that are not revoked. Raises JetStreamError."""
        return [key for key in await self._keys.all() if tenant_token(key.tenant) == self.tenant and not key.revoked]

    async def revoke(self, key: KeyRecord) -> None:
        """Revoke one of its keys. Raises JetStreamError, KeyUnknown."""
        await self._keys.revoke(key.id)

    def _of_letter(self, data: bytes) -> bool:
        try:
            return decode(DeadLetter, data).envelope.tenant == self.tenant
        except WireError:
            pass
        try:
            subject = decode(Unreadable, data).subject
        except WireError:
            return False
        return self.subjects.tenant_of(subject) == self.tenant

    def _of_placement(self, data: bytes) -> bool:
        try:
            return decode(Routed, data).tenant == self.tenant
        except WireError:
            return False


def spilled_payload(kind: str, data: bytes) -> str | None:
    """Return the name of the object with the payload of a stored request or dead letter, None if it has none."""
    try:
        if kind == STREAMS["DLQ"]:
            envelope = decode(DeadLetter, data).envelope
        elif kind in (STREAMS["REQ"], STREAMS["MOVED"]):
            envelope = decode(Envelope, data)
        else:
            return None
    except WireError:
        return None
    return envelope.spill.object if envelope.spill is not None else None
