"""Payloads too large for a message lie in the object store; the worker fetches them before it starts."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

import structlog

from headrace.broker.errors import BrokerError
from headrace.broker.messages import Envelope
from headrace.broker.messages.prefill import PrefillJob
from headrace.jetstream.errors import JetStreamError, ObjectError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()

RETRY_S = 0.2
_INLINE_BYTES = 1 << 20  # hashing these takes about a millisecond


async def sha256_hex(data: bytes) -> str:
    """The digest of a payload; of a large one in a thread, for nothing else would run meanwhile."""
    if len(data) <= _INLINE_BYTES:
        return hashlib.sha256(data).hexdigest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())


async def fetch_payload(
    messaging: Messaging, subjects: Subjects, envelope: Envelope | PrefillJob, *, wanted: Callable[[], bool]
) -> bytes:
    """The payload, from the envelope or from the object store; tried as long as it is `wanted`.

    Raises BrokerError when it is lost, damaged or no longer wanted.
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
        if len(data) != spill.size or await sha256_hex(data) != spill.digest:
            raise BrokerError(f"the payload of request {envelope.id} is damaged: {len(data)} bytes, expected {spill.size}")
        return data
    raise BrokerError(f"the payload of request {envelope.id} is no longer wanted")
