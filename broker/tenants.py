"""Finds all that a deployment has stored of one tenant, in streams, buckets and object stores.

Most places name the tenant in a subject, a key or the name of an object.  Stored responses, dead letters and placements name
it in their content only, so those of all tenants are read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from headrace.broker.codec import NOT_DECODED, decode, encode
from headrace.broker.durable.errors import JobMalformed
from headrace.broker.durable.stored_job import parse_job
from headrace.broker.errors import WireError
from headrace.broker.ingress.response_store import StoredResponse
from headrace.broker.keys import KeyRecord, KeyStore, KeyUnknown
from headrace.broker.messages.control import Routed
from headrace.broker.messages.durable import DeadLetter, Unreadable
from headrace.broker.messages.events import Cancel
from headrace.broker.messages.requests import Envelope
from headrace.jetstream.errors import ObjectError, TopologyError
from headrace.jetstream.objects import ObjectSubjects
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
    "job_digests": ("state", "body.{0}.*"),
}
OBJECTS = {"file_contents": ("files", "{0}/"), "large_results": ("results", "{0}."), "responses": ("responses", "")}
KINDS = ("keys", *STREAMS.values(), *BUCKETS, *OBJECTS)


@dataclass(frozen=True, slots=True)
class Place:
    """A stream of one kind of messages, and the filter of the tenant's."""

    kind: str
    stream: str
    pattern: str
    is_theirs: Callable[[bytes], bool] | None = None  # None: all that the filter has are the tenant's
    on_demand: bool = False  # the stream need not be there


class TenantInventory:
    def __init__(self, messaging: Messaging, subjects: Subjects, tenant: str) -> None:
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
        return [key for key in await self._keys.all() if tenant_token(key.tenant) == self.tenant and not key.revoked]

    async def revoke(self, key: KeyRecord) -> None:
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


# Deletes all that is stored of one tenant, and looks again until there is nothing left.
#
# Each step is idempotent, and what an interrupted run has not deleted the next one finds. Keys are revoked first and batches
# deleted before their jobs, so that nothing new is made meanwhile; carriers are told to end the jobs that run.

PASSES = 6
PAUSE_S = 0.5  # between passes: a carrier that was told to end a job writes its result within 0.3 s
CANCELLED_AT_ONCE = 256


class TenantErasure:
    def __init__(self, inventory: TenantInventory) -> None:
        self._inventory = inventory
        self._messaging = inventory.messaging
        self._subjects = inventory.subjects

    async def run(self, *, passes: int = PASSES) -> tuple[dict[str, int], bool]:
        """Delete until a pass finds nothing. Returns how many of each kind were deleted, and whether nothing was left.

        Raises JetStreamError; what is left is deleted by the next run.
        """
        deleted: Counter[str] = Counter()
        for number in range(passes):
            if number:
                await asyncio.sleep(PAUSE_S)
            found = await self._pass()
            deleted += found
            if not found:
                return dict(deleted), True
        return dict(deleted), False

    async def _pass(self) -> Counter[str]:
        deleted: Counter[str] = Counter()
        for key in await self._inventory.keys():
            try:
                await self._inventory.revoke(key)
            except KeyUnknown:
                continue
            deleted["keys"] += 1
        deleted["batches"] = await self._delete_entries("batches")
        for place in self._inventory.places:
            deleted[place.kind] += await self._delete_messages(place)
        for kind in BUCKETS:
            deleted[kind] += await self._delete_entries(kind)
        for kind, (bucket, _) in OBJECTS.items():
            names = await self._inventory.objects(kind)
            for name in names:
                await self._erase_object(bucket, name)
            deleted[kind] += len(names)
        return +deleted

    async def _delete_messages(self, place: Place) -> int:
        deleted = 0
        async for page in self._inventory.messages(place):
            if place.kind == STREAMS["JOB"]:
                self._tell_carriers(page)
            for name in {spilled_payload(place.kind, message.data) for message in page} - {None}:
                await self._erase_object("spill", str(name))
            if place.is_theirs is not None:
                for message in page:
                    deleted += await self._messaging.delete_message(place.stream, message.seq)
        if place.is_theirs is None and not (place.on_demand and not await self._inventory.is_there(place)):
            deleted = await self._messaging.purge_stream(place.stream, subject=place.pattern)
        return deleted

    def _tell_carriers(self, page: Iterable[StoredMessage]) -> None:
        ids = []
        for message in page:
            try:
                tenant = self._inventory.tenant
                job = parse_job(message.data, message.headers or {}, tenant=tenant, seq=message.seq, stored=message.at)
            except JobMalformed:
                continue  # it is deleted like the others
            ids.append(job.id)
        for start in range(0, len(ids), CANCELLED_AT_ONCE):
            self._messaging.send(self._subjects.cancel_jobs(), encode(Cancel(ids=ids[start : start + CANCELLED_AT_ONCE])))

    async def _delete_entries(self, kind: str) -> int:
        bucket = self._messaging.bucket(self._subjects.bucket(BUCKETS[kind][0]))
        entries = await self._inventory.entries(kind)
        for entry in entries:
            await bucket.delete(entry.key)
        return len(entries)

    async def _erase_object(self, bucket: str, name: str) -> None:
        store = self._subjects.bucket(bucket)
        await self._messaging.objects(store).delete(name)
        layout = ObjectSubjects(store)
        await self._messaging.purge_stream(layout.stream, subject=layout.description(name))
