"""Broadcasts: cancellations, events of jobs, load reports."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.broker.messages.base import Record


class Cancel(Record, frozen=True, omit_defaults=True, kw_only=True):
    """On hr.cancel.<pool>."""

    ids: list[str]


EventKind = Literal["placed", "started", "prefilled", "settled", "moved"]


class JobEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """[kind, id, attempt, worker, tokens, uncached, blocks, by, hashes, prefill]

    `tokens`: of the prompt, in `settled` of the answer. `uncached`: prompt tokens to be prefilled, predicted in `placed`,
    measured in `prefilled`. `by`: the router that placed it.
    `hashes` (only in `placed`): chain values that the worker is about to hold and nobody has seen there yet, at most 512 of
    them, so that all routers send the siblings of a burst to the same worker.
    `prefill` (only in `placed`): who computes the prompt, a prefill worker or `*` for any of them; empty = the worker itself.
    """

    kind: EventKind
    id: str
    attempt: int
    worker: str
    tokens: int = 0
    uncached: int = 0
    blocks: int = 0
    by: str = ""
    hashes: bytes = b""
    prefill: str = ""


class JobEvents(Record, frozen=True, omit_defaults=True, kw_only=True):
    """On hr.ev.<pool>."""

    events: list[JobEvent]


class LoadReport(Record, frozen=True, omit_defaults=True, kw_only=True):
    """On hr.load.<pool>.<worker>, on change and every 200 ms."""

    worker: str
    epoch: int
    n: int
    at: float
    slots: int  # 0: nothing is to be placed there, for a job in its last life runs alone
    running: int
    waiting: int
    blocks_total: int = 0
    blocks_used: int = 0
    queued_prefill_tokens: int = 0
    step_s: float = 0.0  # duration of the last engine step …
    step_prefill_tokens: int = 0  # … the prompt tokens it computed
    step_decodes: int = 0  # … and the sequences that got a token in it
    handover_s: float = 0.0  # of the last prompt that another worker computed: from its blocks being ready to the first token …
    handover_tokens: int = 0  # … and the tokens fetched
