"""Creates, lists, revokes and rotates API keys in the bucket of a deployment."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import structlog

from headrace.broker.codec import decode, encode
from headrace.broker.errors import WireError
from headrace.broker.keys.errors import KeyInvalid, KeyUnknown
from headrace.broker.keys.key_texts import digest_of, new_key_id, new_key_text
from headrace.broker.keys.records import SCOPES, KeyHash, KeyRecord, Limits
from headrace.jetstream.errors import RevisionConflict
from headrace.jetstream.ports import Change, Messaging, Watch
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger(__name__)

_TRIES = 8  # of a change that others change meanwhile
MOST_NAME = 128


class KeyStore:
    """The API keys of a deployment. Every change is one compare-and-set; watches of other processes see it at once."""

    def __init__(self, messaging: Messaging, subjects: Subjects, *, wall: Callable[[], float] = time.time) -> None:
        self._bucket = messaging.bucket(subjects.bucket("keys"))
        self._wall = wall

    async def create(self, wish: KeyRecord) -> tuple[KeyRecord, str]:
        """Store a key like `wish` with a new id and hash. Returns it and its text, which is nowhere kept. Raises KeyInvalid."""
        check_wish(wish)
        while True:
            key_id = new_key_id()
            text = new_key_text(key_id)
            record = msgspec.structs.replace(
                wish, id=key_id, hashes=[KeyHash(sha256=digest_of(text.encode()))], created=self._wall()
            )
            try:
                await self._bucket.create(key_id, encode(record))
            except RevisionConflict:
                continue  # the id is taken
            return record, text

    async def all(self) -> list[KeyRecord]:
        """Return all keys, the oldest first; unreadable ones are left out and logged."""
        found = [read_key(entry.key, entry.value) for entry in await self._bucket.entries()]
        return sorted((record for record in found if record is not None), key=lambda record: record.created)

    async def find(self, name_or_id: str) -> KeyRecord:
        """Return the key with this id, or with this name. Raises KeyUnknown, also for a name that several keys have."""
        records = await self.all()
        exact = [record for record in records if record.id == name_or_id]
        found = exact or [record for record in records if record.name == name_or_id]
        if len(found) == 1:
            return found[0]
        if found:
            raise KeyUnknown(f"several keys are called {name_or_id!r}: {', '.join(r.id for r in found)}; give the id")
        raise KeyUnknown(f"there is no key {name_or_id!r}")

    async def revoke(self, key_id: str) -> KeyRecord:
        """Revoke a key for good. The record stays, so that keys remain in force. Raises KeyUnknown."""
        return await self._change(key_id, lambda old: old if old.revoked else _replaced(old, revoked=self._wall()))

    async def rotate(self, key_id: str, *, grace_s: float) -> tuple[KeyRecord, str]:
        """Give a key a new text, which is returned. The old one stays good for `grace_s`. Raises KeyUnknown, KeyInvalid."""
        text = new_key_text(key_id)

        def change(old: KeyRecord) -> KeyRecord:
            now = self._wall()
            if (state := old.state(now)) != "active":
                raise KeyInvalid(f"the key {key_id} is {state}: make a new one")
            kept = [KeyHash(sha256=old.hashes[0].sha256, until=now + grace_s)] if grace_s > 0 and old.hashes else []
            return _replaced(old, hashes=[KeyHash(sha256=digest_of(text.encode())), *kept])

        return await self._change(key_id, change), text

    def watch(self, on_change: Callable[[Change], None]) -> Watch:
        """Return a watch of all keys, which reports `Change`s whose values `read_key` reads."""
        return self._bucket.watch(on_change)

    async def _change(self, key_id: str, change: Callable[[KeyRecord], KeyRecord]) -> KeyRecord:
        for _ in range(_TRIES):
            entry = await self._bucket.get(key_id)
            old = read_key(key_id, entry.value) if entry is not None else None
            if entry is None or old is None:
                raise KeyUnknown(f"there is no key {key_id!r}")
            new = change(old)
            if new == old:
                return old
            try:
                await self._bucket.update(key_id, encode(new), revision=entry.revision)
            except RevisionConflict:
                continue
            return new
        raise KeyInvalid(f"others change the key {key_id} all the time")


def read_key(key_id: str, value: bytes) -> KeyRecord | None:
    """Return a stored key, or None for one that cannot be read or lies under another's id, which is logged."""
    try:
        record = decode(KeyRecord, value)
    except WireError as error:
        log.warning("key.unreadable", key=key_id, error=str(error))
        return None
    if record.id != key_id:
        log.warning("key.unreadable", key=key_id, error=f"it says that it is the key {record.id[:40]!r}")
        return None
    return record


def check_wish(wish: KeyRecord) -> None:
    """Raise KeyInvalid, which names the field and the value."""
    if not wish.name or len(wish.name) > MOST_NAME or not wish.name.isprintable():
        raise KeyInvalid(f"a key needs a name of 1 to {MOST_NAME} printable characters, got {wish.name[:200]!r}")
    if not wish.tenant or len(wish.tenant) > MOST_NAME or not wish.tenant.isprintable():
        raise KeyInvalid(f"a tenant has 1 to {MOST_NAME} printable characters, got {wish.tenant[:200]!r}")
    if unknown := sorted(set(wish.scopes) - set(SCOPES)):
        raise KeyInvalid(f"{unknown[0]!r} is no scope; there are {', '.join(SCOPES)}")
    if not wish.scopes:
        raise KeyInvalid("a key needs at least one scope")
    if "batches" in wish.scopes and wish.models:
        raise KeyInvalid("a key for some models only cannot have the scope batches: each line of a batch names its model")
    for limits in (wish.limits, wish.tenant_limits):
        _check_limits(limits)


def _check_limits(limits: Limits) -> None:
    for name in Limits.__struct_fields__:
        if getattr(limits, name) < 0:
            raise KeyInvalid(f"{name} must be 0 (no limit) or more, got {getattr(limits, name)}")


def _replaced(record: KeyRecord, **changes: object) -> KeyRecord:
    return msgspec.structs.replace(record, **changes)
