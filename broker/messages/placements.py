"""Placements as they were made (hr.route.<pool>, stream ROUTE), and what a router says of one (`hr.ctl.<router>`)."""

from __future__ import annotations

import msgspec

from headrace.broker.messages.base import Record
from headrace.broker.messages.control import Inspect
from headrace.broker.messages.requests import PrefillDecision


class Routed(Record, frozen=True, omit_defaults=True, kw_only=True):
    """One placement, for those who want to know later what another policy would have done (`headrace replay placements`)."""

    at: float  # when it was placed
    id: str
    attempt: int = 1
    router: str = ""
    worker: str
    reason: str = ""
    tokens: int  # prompt length
    max_tokens: int = 0
    uncached: int = 0  # tokens to be prefilled, predicted
    waited_s: float = 0.0  # in the window
    predicted_ttft_s: float = 0.0
    tenant: str = "_"
    request_class: str = "std"
    priority: int = 0
    block_size: int = 0
    blocks: int = 0  # whole blocks of the prompt …
    hashes: bytes = b""  # … and the chain values of the first of them, at most 2048
    adapter: str = ""
    session: str = ""
    prefill: PrefillDecision | None = None  # where its prompt was to be computed, if that was a question


class Explain(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="explain"):
    """Why was this request placed where it is? Answered with Explanation."""

    id: str


RouterControl = Explain | Inspect


class Candidate(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One worker as the router saw it when it decided. Blocks are of the pool's block size; costs are seconds."""

    worker: str
    device: int = 0  # blocks of the prompt's prefix on that worker, per tier
    host: int = 0
    disk: int = 0
    uncached: int = 0  # tokens it would have to prefill
    pending: int = 0  # prefill tokens already before it
    running: int = 0
    wait_s: float = 0.0  # predicted, until its prefill could begin
    cost_s: float = 0.0  # predicted time to first token, with the preferences that count
    room: bool = True
    why_not: str = ""  # not eligible, and the reason


class Explanation(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A decision, or (`known` false) the word that this router knows nothing of the request."""

    id: str
    known: bool = True
    router: str = ""
    policy: str = ""
    state: str = ""  # waiting, placed, refused
    worker: str = ""
    reason: str = ""
    at: float = 0.0
    waited_s: float = 0.0  # in the window
    predicted_ttft_s: float = 0.0
    candidates: list[Candidate] = []
    prefill: PrefillDecision | None = None  # where its prompt is computed, if that was a question
