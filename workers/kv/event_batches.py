"""Reads the batches of cache events that engines publish: what vLLM's and SGLang's have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import structlog

from headrace.workers import metrics
from headrace.workers.engine import KvBatch, KvEvent, Tier

log = structlog.get_logger()


class BatchReader:
    """Reads the batches of one engine. `decoder` gives an object with `events`, `to_event` translates one of them."""

    def __init__(self, engine: str, decoder: msgspec.msgpack.Decoder[Any], to_event: Callable[[Any], KvEvent]) -> None:
        self._engine = engine
        self._decoder = decoder
        self._to_event = to_event

    def read(self, number: int, payload: bytes) -> KvBatch:
        """Read the events of a step. An unreadable batch becomes `cleared`, because the known state is unreliable after it."""
        try:
            return KvBatch(map(self._to_event, self._decoder.decode(payload).events), number)
        except (msgspec.DecodeError, ValueError) as error:
            metrics.KV_TROUBLE.labels("malformed").inc()
            log.error("kv.malformed", engine=self._engine, number=number, error=str(error))
            return KvBatch([KvEvent(kind="cleared")], number, partial=True)


def tier_of(medium: str | None, tiers: Mapping[str, Tier]) -> Tier:
    """Return the tier of an engine's medium; without one it is the device. Raises ValueError for an unknown medium."""
    if medium is None:
        return "device"
    tier = tiers.get(medium)
    if tier is None:
        raise ValueError(f"medium {medium!r} is unknown; known: {', '.join(tiers)}")
    return tier
