"""Keeps small records of tenants by kind and id, so that they can be listed and changed: what object stores cannot do.

A record is a value of a few kilobytes in the bucket `<prefix>_records` with its own time to live; larger parts of it are in the
store of responses, under names that the record knows. When the bucket is full the oldest records of the tenant that has the
most are removed (`store_room.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

from headrace.broker.errors import ResponseNotStored
from headrace.broker.ingress.store_room import Held, Place, StoreRoom
from headrace.jetstream.errors import JetStreamError, RequestTimeout, RevisionConflict
from headrace.jetstream.kv import is_marker
from headrace.jetstream.ports import Messaging, StoredMessage
from headrace.jetstream.subjects import Subjects, check_token

WRITE_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 5.0
TRIES = 16  # of a change, against others that change the same record
PAUSE_S = 0.01  # between tries, growing
MESSAGE_BYTES = 256  # of the stream, beside the value: subject, headers, what the server keeps with a message


class RecordIndex:
    """Reads and writes records. It caches none."""

    def __init__(self, messaging: Messaging, subjects: Subjects, *, ttl_s: float) -> None:
        """`ttl_s`: the life of a record since it was last written."""
        bucket = subjects.bucket("records")
        self._bucket = messaging.bucket(bucket)
        self._ttl_s = ttl_s
        self.room = StoreRoom(messaging, Place("records", f"KV_{bucket}", f"$KV.{bucket}.>", kept_record, self._bucket.delete))

    async def put(self, kind: str, tenant: str, name: str, value: bytes) -> None:
        """Write a record, new or not. Raises ResponseNotStored."""
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S), self.room.reserve(len(value) + MESSAGE_BYTES):
                await self._bucket.put(record_key(kind, tenant, name), value, ttl_s=self._ttl_s)
        except TimeoutError:
            raise ResponseNotStored(f"not stored within {WRITE_TIMEOUT_S:g} s", reason="timeout") from None
        except JetStreamError as error:
            raise ResponseNotStored(str(error), reason="unavailable") from error

    async def get(self, kind: str, tenant: str, name: str) -> bytes | None:
        """Return a record, None if there is none. Raises a JetStreamError if the bucket cannot be reached."""
        entry = await self._bucket.get(record_key(kind, tenant, name))
        return entry.value if entry is not None else None

    async def change(self, kind: str, tenant: str, name: str, change: Callable[[bytes], bytes]) -> bytes | None:
        """Replace a record by what `change` makes of it, and return that; None if there is none.

        `change` is called again if another writer was first. Raises what it raises, and a JetStreamError.
        """
        key = record_key(kind, tenant, name)
        for attempt in range(TRIES):
            entry = await self._bucket.get(key)
            if entry is None:
                return None
            value = change(entry.value)
            try:
                async with self.room.reserve(len(value) + MESSAGE_BYTES):
                    await self._bucket.update(key, value, revision=entry.revision, ttl_s=self._ttl_s)
            except RevisionConflict:
                await asyncio.sleep(PAUSE_S * attempt)
            else:
                return value
        raise RequestTimeout(f"record {name!r} was changed by others {TRIES} times meanwhile")

    async def delete(self, kind: str, tenant: str, name: str) -> None:
        """Delete a record; an absent one is fine. Raises a JetStreamError."""
        await self._bucket.delete(record_key(kind, tenant, name))

    async def list(self, kind: str, tenant: str) -> list[bytes]:
        """Return all records of a kind, in no order. Raises a JetStreamError."""
        pattern = f"{check_token(kind, 'kind')}.{check_token(tenant, 'tenant')}.*"
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                return [entry.value for entry in await self._bucket.entries(pattern)]
        except TimeoutError:
            raise RequestTimeout(f"the records were not read within {READ_TIMEOUT_S:g} s") from None


def digest(name: str) -> str:
    """Return a token for a name of any characters; different names have different ones."""
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def record_key(kind: str, tenant: str, name: str) -> str:
    """Return the key of a record. Names are hashed, because clients choose some of them."""
    return f"{check_token(kind, 'kind')}.{check_token(tenant, 'tenant')}.{digest(name)}"


def kept_record(message: StoredMessage) -> Held | None:
    """Return whose record a message of the bucket is, None for one whose key is none of a record."""
    parts = message.subject.split(".", 2)  # `$KV`, the bucket, the key
    key = parts[2]
    names = key.split(".")
    if len(names) != 3:
        return None
    return Held(key, None if is_marker(message) else names[1], len(message.data) + MESSAGE_BYTES)
