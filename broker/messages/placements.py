"""Defines records of placements (hr.route.<pool>, stream ROUTE) and a router's explanation of one (`hr.ctl.<router>`)."""

from __future__ import annotations

import msgspec

from headrace.broker.messages.base import Attempt, Finite, Record
from headrace.broker.messages.control import Inspect
from headrace.broker.messages.requests import PrefillDecision


class Routed(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A placement, recorded so that it can be replayed under another policy (`headrace replay placements`)."""

    at: float  # time of the placement
    id: str
    attempt: int = 1
    router: str = ""
    worker: str
    reason: str = ""
    tokens: int  # prompt length
    max_tokens: int = 0
    uncached: int = 0  # predicted tokens to prefill
    waited_s: float = 0.0  # time in the router's window
    predicted_ttft_s: float = 0.0
    tenant: str = "_"
    request_class: str = "std"
    priority: int = 0
    block_size: int = 0
    blocks: int = 0  # whole blocks of the prompt
    hashes: bytes = b""  # chain values of the prompt's first blocks, at most 2048
    adapter: str = ""
    session: str = ""
    prefill: PrefillDecision | None = None  # where its prompt was to be prefilled, if the router decided that
    fleet: str = ""  # in a pool with several fleets
    fleet_reason: str = ""
    ttft_target_s: float | None = None
    itl_target_s: float | None = None


class Explain(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="explain"):
    """A question for the reasons of a placement. Answered with Explanation.

    `id` is that of a request or its client's own id.
    """

    id: str


RouterControl = Explain | Inspect


class Candidate(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A worker as the router saw it at the decision. Blocks are of the pool's block size; costs are seconds."""

    worker: str
    device: int = 0  # blocks of the prompt's prefix on that worker, per tier
    host: int = 0
    disk: int = 0
    uncached: int = 0  # tokens that it would have to prefill
    pending: int = 0  # prefill tokens that are queued there already
    running: int = 0
    wait_s: float = 0.0  # predicted time until the prefill could begin
    cost_s: float = 0.0  # predicted time to first token, adjusted by the preferences
    room: bool = True
    why_not: str = ""  # reason why it is not eligible


class FleetOption(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A fleet as the router saw it for one request. Times are seconds; -1 = nothing is known."""

    fleet: str
    price: float = 0.0
    rank: int = 0  # 0 = preferred
    state: str = ""  # meets, late, unknown
    ttft_s: float = 0.0  # predicted, from arrival, by its best worker
    itl_s: float = 0.0  # predicted
    late_s: float = 0.0  # by how much it is predicted to miss the targets, over the whole answer


class FleetDecision(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The fleet that a request was placed in, and why."""

    fleet: str
    reason: str = ""  # cheapest, meets, least_late, unknown, overflow, policy, trial; of a grid: grid, override, retry
    ttft_target_s: float = 0.0
    itl_target_s: float = 0.0
    options: list[FleetOption] = []


class Decided(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A decision of a router about a request, or that it waits."""

    id: str
    name: str = ""  # the client's own id of the request
    attempt: Attempt = 1
    router: str = ""
    policy: str = ""
    state: str = ""  # waiting, placed, refused
    worker: str = ""
    reason: str = ""
    at: Finite = 0.0
    waited_s: float = 0.0  # time in the router's window
    since_arrival_s: float = 0.0  # from the request's arrival at its frontend to the decision
    predicted_ttft_s: float = 0.0  # from the arrival
    candidates: list[Candidate] = []
    prefill: PrefillDecision | None = None  # where its prompt is prefilled, if the router decided that
    fleet: FleetDecision | None = None  # in a pool with several fleets


class Explanation(Decided, frozen=True, omit_defaults=True, kw_only=True):
    """The last decision about a request; `known` is False if the router does not know the request.

    `earlier`: what this router decided before about requests with the same id or client's id, oldest first.
    """

    known: bool = True
    earlier: list[Decided] = []
