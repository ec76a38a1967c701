"""Defines KV cache events, which are published on hr.kv.<pool>.<worker> and kept in the KV stream."""

from __future__ import annotations

from headrace.broker.messages.base import Count, Place, Record, Run64


class KvStep(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="step"):
    """A change of a worker's cache: `cleared` applies first, then `removed`, then `stored`.

    `epoch` changes when the engine starts; `n` counts this worker's KV messages of the epoch from 0, without a gap. Values map
    a tier (device, host, disk) to chain values, u64 little endian. `device` comes first wherever tiers are ordered.
    """

    worker: Place
    epoch: Run64
    n: Count
    cleared: bool = False
    removed: dict[str, bytes] = {}
    stored: dict[str, bytes] = {}


class KvReset(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="reset"):
    """A part (at most 256 KiB) of a worker's whole inventory of blocks.

    The parts of a dump follow each other in `n` without a step between them. Readers collect them and apply all of them at
    `last`: from then on the worker holds exactly these blocks.
    """

    worker: Place
    epoch: Run64
    n: Count
    dump: Count  # number of the dump in its epoch
    part: Count  # from 0
    last: bool = False
    blocks: dict[str, bytes] = {}


KvMessage = KvStep | KvReset
