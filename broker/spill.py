"""Payloads that are too large for a message: encrypted, stored as objects, and fetched before the worker starts the run."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

import structlog

from headrace.broker.errors import BrokerError, BrokerUnavailable
from headrace.broker.messages.prefill import PrefillJob
from headrace.broker.messages.requests import EncodeMedia, Envelope, Spill
from headrace.jetstream.errors import JetStreamError, ObjectError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

# Encrypts what lies in a store that workers of all pools read, under a key that only its message has.
#
# Authenticated encryption (XSalsa20-Poly1305, of libsodium), a random key for each object. Who reads the store without the
# message, a worker of another pool, sees the size; who changes it is noticed.

_SEALED_INLINE_BYTES = 1 << 18  # encrypting these takes about two milliseconds


async def seal(data: bytes) -> tuple[bytes, bytes]:
    """Return a new key, and the data encrypted under it."""
    import nacl.secret
    import nacl.utils

    key = nacl.utils.random(nacl.secret.SecretBox.KEY_SIZE)
    box = nacl.secret.SecretBox(key)
    if len(data) <= _SEALED_INLINE_BYTES:
        return key, bytes(box.encrypt(data))
    return key, bytes(await asyncio.to_thread(box.encrypt, data))


async def unseal(spill: Spill, data: bytes) -> bytes:
    """Return the content of an object, which is encrypted if its message has a key. Raises BrokerError if it was changed."""
    if not spill.key:
        return data
    import nacl.exceptions
    import nacl.secret

    try:
        box = nacl.secret.SecretBox(spill.key)
        if len(data) <= _SEALED_INLINE_BYTES:
            return box.decrypt(data)
        return await asyncio.to_thread(box.decrypt, data)
    except (nacl.exceptions.CryptoError, ValueError) as error:  # a ValueError: it is too short to be one
        raise BrokerError(f"the object {spill.object} is damaged: {error}") from error


log = structlog.get_logger()

RETRY_S = 0.2
_INLINE_BYTES = 1 << 20  # hashing these takes about a millisecond


async def sha256_hex(data: bytes) -> str:
    if len(data) <= _INLINE_BYTES:
        return hashlib.sha256(data).hexdigest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())


async def fetch_payload(
    messaging: Messaging, subjects: Subjects, envelope: Envelope | PrefillJob | EncodeMedia, *, wanted: Callable[[], bool]
) -> bytes:
    """Return the payload from the envelope or from the object store, with retries while `wanted()` is True.

    Raises BrokerError if the payload is lost, damaged or no longer wanted.
    """
    spill = envelope.spill
    if spill is None:
        return envelope.payload
    store = messaging.objects(subjects.bucket("spill"))
    while wanted():
        try:
            data = await store.get(spill.object)
        except ObjectError as error:
            raise BrokerError(f"the payload of request {envelope.id} is gone: {error}") from error
        except JetStreamError as error:
            log.warning("spill.retry", request_id=envelope.id, error=str(error))
            await asyncio.sleep(RETRY_S)
            continue
        data = await unseal(spill, data)
        if len(data) != spill.size or await sha256_hex(data) != spill.digest:
            raise BrokerError(f"the payload of request {envelope.id} is damaged: {len(data)} bytes, expected {spill.size}")
        return data
    raise BrokerError(f"the payload of request {envelope.id} is no longer wanted")


KEPT_S = 3600.0  # an ingress reads a result when its frame comes


class ResultObjects:
    """Writes and reads results. Each has a time to live, and is not deleted otherwise."""

    def __init__(self, messaging: Messaging, subjects: Subjects, *, sealed: bool = False) -> None:
        self._sealed = sealed
        self._store = messaging.objects(subjects.bucket("spill"))

    async def put(self, name: str, data: bytes) -> Spill:
        key, stored = await seal(data) if self._sealed else (b"", data)
        try:
            await self._store.put(name, stored, ttl_s=KEPT_S)
        except JetStreamError as error:
            raise BrokerUnavailable(f"a large result could not be stored: {error}") from error
        return Spill(object=name, size=len(data), digest=await sha256_hex(data), key=key)

    async def get(self, spill: Spill) -> bytes:
        """Read a result. Raises BrokerUnavailable, or BrokerError if it is gone or damaged."""
        try:
            data = await self._store.get(spill.object)
        except ObjectError as error:
            raise BrokerError(f"the result {spill.object} is gone: {error}") from error
        except JetStreamError as error:
            raise BrokerUnavailable(f"the result {spill.object} could not be read: {error}") from error
        data = await unseal(spill, data)
        if len(data) != spill.size or await sha256_hex(data) != spill.digest:
            raise BrokerError(f"the result {spill.object} is damaged: {len(data)} bytes, expected {spill.size}")
        return data
