"""Keeps results that are too large for a frame in the object store, between the worker that made them and the ingress."""

from __future__ import annotations

from headrace.broker.errors import BrokerError, BrokerUnavailable
from headrace.broker.messages import Spill
from headrace.broker.sealing import seal, unseal
from headrace.broker.spill import sha256_hex
from headrace.jetstream.errors import JetStreamError, ObjectError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

KEPT_S = 3600.0  # an ingress reads a result when its frame comes


class ResultObjects:
    """Writes and reads results. Each has a time to live, and is not deleted otherwise."""

    def __init__(self, messaging: Messaging, subjects: Subjects, *, sealed: bool = False) -> None:
        """`sealed`: encrypt results, because others may read the store."""
        self._sealed = sealed
        self._store = messaging.objects(subjects.bucket("spill"))

    async def put(self, name: str, data: bytes) -> Spill:
        """Store a result under a name of its own. Raises BrokerUnavailable."""
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
