"""Fetches payloads that are too large for a message from the object store, before the worker starts the run."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

import structlog

from headrace.broker.errors import BrokerError
from headrace.broker.messages import Envelope
from headrace.broker.messages.encoding import EncodeMedia
from headrace.broker.messages.prefill import PrefillJob
from headrace.broker.sealing import unseal
from headrace.jetstream.errors import JetStreamError, ObjectError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()

RETRY_S = 0.2
_INLINE_BYTES = 1 << 20  # hashing these takes about a millisecond


async def sha256_hex(data: bytes) -> str:
    """Return the digest of a payload. A large one is hashed in a thread, so that the event loop goes on."""
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
