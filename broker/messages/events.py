"""Defines broadcasts: cancellations, job events and load reports."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from headrace.broker.messages.requests import (
    MOST_RANKS,
    Attempt,
    Count,
    Name,
    OptionalToken,
    Place,
    Rank,
    Record,
    Run64,
    Seconds,
    Token,
    Tokens,
    UnixTime,
)


class Cancel(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The ids of requests that their ingress has ended, on hr.cancel.<pool>."""

    ids: list[str]


EventKind = Literal["placed", "started", "prefilled", "settled", "moved"]


class JobEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A step in the life of a job: [kind, id, attempt, worker, tokens, uncached, blocks, by, hashes, prefill, rank, fetch_ms].

    `tokens`: of the prompt, in `settled` of the answer. `uncached`: prompt tokens to be prefilled, predicted in `placed`,
    measured in `prefilled`. `by`: the router that placed it.
    `hashes` (only in `placed`): chain values that the worker is about to hold and has not reported yet, at most 512 of them,
    so that all routers send the requests of a burst with one prefix to the same worker.
    `prefill` (only in `placed`): the worker that prefills the prompt, or `*` for any prefill worker; empty = the worker itself.
    `rank`: the data-parallel rank of the worker; None = it has only one, or the sender does not know it.
    `fetch_ms` (only in `prefilled`, of a prompt that another worker computed and whose blocks were then fetched): from the
    blocks being ready to the first token, at least 1. An integer, since the zero of all other events is one byte then.
    """

    kind: EventKind
    id: str
    attempt: Attempt
    worker: Name
    tokens: Tokens = 0
    uncached: Tokens = 0
    blocks: Tokens = 0
    by: OptionalToken = ""
    hashes: bytes = b""
    prefill: Name = ""
    rank: Rank | None = None
    fetch_ms: Count = 0


class JobEvents(Record, frozen=True, omit_defaults=True, kw_only=True):
    """Job events of a pool, on hr.ev.<pool>."""

    events: list[JobEvent]


class Refused(Record, frozen=True, omit_defaults=True, kw_only=True):
    """Requests that an ingress has not taken because it or a queue was full, or no worker was there, on hr.refused.<pool>."""

    count: Count = 1
    reason: Name = ""


class RankLoad(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The load of a data-parallel rank, with the fields of the report: an array in this order."""

    running: Count = 0
    waiting: Count = 0
    blocks_total: Count = 0
    blocks_used: Count = 0
    queued_prefill_tokens: Count = 0
    step_prefill_tokens: Count = 0
    step_decodes: Count = 0
    batch: Count = 0
    yielding: Count = 0
    yielding_blocks: Count = 0


class LoadReport(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The load of a worker, sent on change and every 200 ms on hr.load.<pool>.<worker>."""

    worker: Token
    epoch: Run64
    n: Count
    at: UnixTime
    slots: Count  # 0: the worker is on trial, and no job may be placed here but suspects
    running: Count
    waiting: Count
    blocks_total: Count = 0
    blocks_used: Count = 0
    queued_prefill_tokens: Count = 0
    step_s: Seconds = 0.0  # duration of the last engine step
    step_prefill_tokens: Count = 0  # prompt tokens computed in the last engine step
    step_decodes: Count = 0  # sequences that got a token in the last engine step
    handover_s: Seconds = 0.0  # last remote prefill: time from its blocks being ready to the first token
    handover_tokens: Count = 0  # last remote prefill: tokens fetched
    suspects: Count = 0  # uncleared suspects that run or wait here
    limit: Count = 0  # the smallest group limit among them
    batch: Count = 0  # runs of class batch among `running`
    yielding: Count = 0  # batch runs among `running` that make way for interactive work
    yielding_blocks: Count = 0  # KV blocks that these hold, about
    ranks: Annotated[
        list[RankLoad], msgspec.Meta(max_length=MOST_RANKS)
    ] = []  # the same per data-parallel rank; empty for a worker with one
    tiers: Annotated[
        list[Count], msgspec.Meta(max_length=8)
    ] = []  # blocks that its prefix cache holds: device, host, disk; empty where the engine does not tell


# Defines KV cache events, which are published on hr.kv.<pool>.<worker> and kept in the KV stream.


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
