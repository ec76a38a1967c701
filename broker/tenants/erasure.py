"""Deletes all that is stored of one tenant, and looks again until there is nothing left.

Each step is idempotent, and what an interrupted run has not deleted the next one finds.  Keys are revoked first and batches
deleted before their jobs, so that nothing new is made meanwhile; carriers are told to end the jobs that run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from headrace.broker.codec import encode
from headrace.broker.durable.errors import JobMalformed
from headrace.broker.durable.stored_job import parse_job
from headrace.broker.keys.errors import KeyUnknown
from headrace.broker.messages import Cancel
from headrace.broker.tenants.inventory import BUCKETS, OBJECTS, STREAMS, Place, TenantInventory, spilled_payload
from headrace.jetstream.objects.layout import ObjectSubjects
from headrace.jetstream.ports import StoredMessage

PASSES = 6
PAUSE_S = 0.5  # between passes: a carrier that was told to end a job writes its result within 0.3 s
CANCELLED_AT_ONCE = 256


class TenantErasure:
    """The deletion of one tenant's data."""

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
        """Delete an object with the description that would say that it was there."""
        store = self._subjects.bucket(bucket)
        await self._messaging.objects(store).delete(name)
        layout = ObjectSubjects(store)
        await self._messaging.purge_stream(layout.stream, subject=layout.description(name))
