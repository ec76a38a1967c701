"""API keys: their texts and hashes, their records in a bucket, and the usage counters of keys and tenants."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable
from typing import Literal, get_args

import msgspec
import structlog

from headrace.base.errors import HeadraceError
from headrace.broker.codec import decode, encode
from headrace.broker.errors import WireError
from headrace.broker.jobs import new_id
from headrace.broker.messages.requests import Record
from headrace.jetstream.errors import RevisionConflict
from headrace.jetstream.ports import Change, Messaging, Watch
from headrace.jetstream.subjects import Subjects


class ApiKeyError(HeadraceError):
    """Base of the errors of API keys."""


class KeyUnknown(ApiKeyError):
    """There is no such key."""


class KeyInvalid(ApiKeyError):
    """The wish for a key, or for its change, makes no sense."""


# Makes the texts of API keys, and the hashes by which they are known.
#
# A key is `hr_sk_<public id>_<secret>`: the id of 8 characters may be shown and logged, the secret has 256 random bits. So a
# plain SHA-256 is enough to keep it from any reader of the store.

ID_LENGTH = 8
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"  # without letters that look like digits
_KEY = re.compile(r"hr_sk_(?P<id>[a-z0-9]{8})_[A-Za-z0-9_-]{43}\Z")


def new_key_id() -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(ID_LENGTH))


def new_key_text(key_id: str) -> str:
    return f"hr_sk_{key_id}_{secrets.token_urlsafe(32)}"


def digest_of(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def public_id(text: str) -> str | None:
    """Return the public id in a key of Headrace's own form, for the log; None for any other text."""
    match = _KEY.match(text)
    return match["id"] if match else None


Scope = Literal[
    "generate",
    "embed",
    "tokens",
    "models",
    "stored",
    "files",
    "batches",
    "priority",
    "direct",
    "act_as",
    "metrics",
    "admin",
]
SCOPES: tuple[str, ...] = get_args(Scope)

CLIENT_SCOPES: tuple[Scope, ...] = ("generate", "embed", "tokens", "models", "stored", "files", "batches")
"""What a key may do unless it is told: everything that clients do for their own tenant."""

SCOPE_TEXTS: dict[str, str] = {
    "generate": "chats, completions, responses, messages, speech; cancelling them",
    "embed": "embeddings, scores, ranks and classes",
    "tokens": "tokenising and counting tokens",
    "models": "listing models",
    "stored": "stored responses, chats, conversations and durable streams",
    "files": "files and uploads",
    "batches": "batches",
    "priority": "service_tier priority and the field priority",
    "direct": "x-headrace-worker, labels and x-headrace-explain",
    "act_as": "x-headrace-tenant: speak for other tenants",
    "metrics": "/metrics and /load",
    "admin": "loading and unloading adapters",
}


class Limits(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The most that a key or its tenant may use; 0 is no limit. Tokens are those of prompts and answers."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0
    tokens_per_day: int = 0

    @property
    def any(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrent or self.tokens_per_day)


NO_LIMITS = Limits()


class KeyHash(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The SHA-256 of a key's text. `until`: the Unix time up to which it is good after a rotation; 0 = no end."""

    sha256: bytes
    until: float = 0.0


class KeyRecord(Record, frozen=True, kw_only=True):
    """An API key as it is stored, under its public id. Times are Unix times, 0 = never; `models` are patterns, none = all.

    `limits` are the key's own, `tenant_limits` those of all keys of its tenant together: the newest key of the tenant that has
    some decides.
    """

    id: str
    name: str
    tenant: str
    hashes: list[KeyHash]
    scopes: list[str]
    created: float
    models: list[str] = msgspec.field(default_factory=list)
    limits: Limits = NO_LIMITS
    tenant_limits: Limits = NO_LIMITS
    expires: float = 0.0
    revoked: float = 0.0
    created_by: str = ""

    def state(self, now: float) -> Literal["active", "expired", "revoked"]:
        if self.revoked:
            return "revoked"
        return "expired" if self.expires and now >= self.expires else "active"


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


INCREMENT = "Nats-Incr"
_TIMEOUT_S = 2.0


class OpenCounts(Record, frozen=True, kw_only=True):
    ingress: str
    open: dict[str, int]


class _Value(msgspec.Struct):
    val: str


_value = msgspec.json.Decoder(_Value)


class UsageCounters:
    def __init__(self, messaging: Messaging, subjects: Subjects) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._stream = subjects.stream("QUOTA")

    async def add(self, owner: str, kind: str, window: int, amount: int) -> int | None:
        """Add to a counter and return the sum of all frontends; None if the server cannot count (before 2.12).

        An addition whose confirmation is lost is repeated under its id and counts once. Raises a JetStreamError.
        """
        subject = self._subjects.quota(owner, kind, window)
        ack = await self._messaging.publish(
            subject, b"", headers={INCREMENT: f"{amount:+d}"}, msg_id=new_id(), timeout_s=_TIMEOUT_S
        )
        if ack.total is not None or not ack.duplicate:
            return ack.total
        for message in await self._messaging.last_messages(self._stream, [subject]):
            return int(_value.decode(message.data).val)
        return None
