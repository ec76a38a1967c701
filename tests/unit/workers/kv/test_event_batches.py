"""A batch that cannot be read, or that names an unknown tier, leaves the known state unreliable, and is counted."""

from __future__ import annotations

import msgspec
import pytest

from headrace.workers import metrics
from headrace.workers.engine import KvEvent, Tier
from headrace.workers.kv.event_batches import BatchReader, tier_of


class Batch(msgspec.Struct, array_like=True):
    events: list[str]


TIERS: dict[str, Tier] = {"GPU": "device", "CPU": "host"}


def event(medium: str) -> KvEvent:
    return KvEvent(kind="removed", tier=tier_of(medium, TIERS), hashes=[1])


reader = BatchReader("an engine", msgspec.msgpack.Decoder(Batch), event)


def test_events_are_translated_in_order() -> None:
    batch = reader.read(7, msgspec.msgpack.encode([["GPU", "CPU"]]))
    assert batch.number == 7
    assert [found.tier for found in batch] == ["device", "host"]
    assert not batch.partial


@pytest.mark.parametrize("payload", [b"\xc1", msgspec.msgpack.encode([["GPU", "TAPE"]])])
def test_an_unreadable_batch_clears_what_is_known(payload: bytes) -> None:
    counter = metrics.KV_TROUBLE.labels("malformed")
    before = counter._value.get()
    batch = reader.read(7, payload)
    assert ([found.kind for found in batch], batch.partial) == (["cleared"], True)
    assert counter._value.get() == before + 1


def test_without_a_medium_a_block_is_on_the_device_and_unknown_ones_are_named() -> None:
    assert tier_of(None, TIERS) == "device"
    with pytest.raises(ValueError, match="'TAPE' is unknown; known: GPU, CPU"):
        tier_of("TAPE", TIERS)
