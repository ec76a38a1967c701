"""A request in the router's window: the part of its message that a router reads, and its states with their transitions.

A request is in the window from its delivery on until its stored message is acknowledged or left to the server.  Everything that
changes its state stands in this file, and nothing outside it assigns `HeldRequest.state`; an illegal transition raises, because
the caller has a bug.

    WAITING ──place──> PLACING ──refuse──> REFUSING
     │   ^               │                    ^
     │   └──wait_again───┘                    │
     │                                        │
     └───────────────refuse───────────────────┘

    each of these three ──leave──> GONE

* `WAITING`: the scheduler has the request.  Only in this state may it be cancelled, or make way for a later attempt.
* `PLACING`: its message is being published to a worker, and the outcome must be known first.  A worker whose queue is full
  sends the request back to `WAITING`; a message that the server can never store is refused.
* `REFUSING`: its judge is being asked to end the request, and only the judge's answer allows the acknowledgement.
* `GONE`: the window has removed it.  A message that was displaced (its stream was deleted and made again) goes from any state;
  a placement or refusal of it that ends later changes nothing any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from headrace.broker.codec import decode
from headrace.broker.messages import HistoryEntry, Record
from headrace.broker.messages.base import Choices, Finite, JobId, Name, Small, Token, Tokens, UnixTime
from headrace.broker.messages.requests import Target
from headrace.broker.protocol.transitions import follow
from headrace.jetstream.ports import Delivery
from headrace.jetstream.subjects import MOVED_CLASSES, RequestClass


class RequestState(StrEnum):
    """The state of a request in the window. Operators see the values. Strings hash in C, which counts twice per request."""

    WAITING = "waiting"
    PLACING = "placing"
    REFUSING = "refusing"
    GONE = "gone"


TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.PLACING, RequestState.REFUSING, RequestState.GONE}),
    RequestState.PLACING: frozenset({RequestState.WAITING, RequestState.REFUSING, RequestState.GONE}),
    RequestState.REFUSING: frozenset({RequestState.GONE}),
    RequestState.GONE: frozenset(),
}


class RequestHead(Record, frozen=True, omit_defaults=True, kw_only=True):
    """An `Envelope` without the payload, which a router has no use for and must not copy."""

    id: JobId
    judge: Token
    deadline: UnixTime
    created: UnixTime = 0.0
    name: Name = ""
    tokens: Tokens
    max_tokens: Tokens = 0
    choices: Choices = 1
    request_class: Name = "std"
    tenant: Token = "_"
    priority: Small = 0
    block_size: Tokens = 0
    hashes: bytes = b""
    adapter: Name = ""
    session: Name = ""
    affinity: Literal["soft", "hard"] = "soft"
    worker: Name = ""
    ttft_target_s: Target | None = None
    itl_target_s: Target | None = None
    agent_priority: Small | None = None
    require: list[Name] = []
    prefer: dict[Name, Finite] = {}
    trace: dict[str, str] = {}


@dataclass(eq=False, slots=True)
class HeldRequest:
    """A request that this router holds un-acked. `delivery` is the newest handle for acks."""

    delivery: Delivery
    head: RequestHead
    attempt: int
    history: list[HistoryEntry]
    request_class: RequestClass
    size: int = 0
    gauge: Any = field(default=None, repr=False)
    state: RequestState = field(default=RequestState.WAITING, init=False)

    # State transitions. Each raises IllegalTransition if the table does not have it.

    def place(self) -> None:
        """Begin to publish the request to a worker."""
        self.state = follow(TRANSITIONS, self.state, RequestState.PLACING)

    def wait_again(self) -> None:
        """Go back to waiting, because the worker's queue is full."""
        self.state = follow(TRANSITIONS, self.state, RequestState.WAITING)

    def refuse(self) -> None:
        """Begin to ask the judge to end the request."""
        self.state = follow(TRANSITIONS, self.state, RequestState.REFUSING)

    def leave(self) -> None:
        """Leave the window for good."""
        self.state = follow(TRANSITIONS, self.state, RequestState.GONE)

    @property
    def waiting(self) -> bool:
        """The scheduler has the request, and nothing is being done with it."""
        return self.state is RequestState.WAITING

    @property
    def gone(self) -> bool:
        """The window has removed the request."""
        return self.state is RequestState.GONE

    @property
    def id(self) -> str:
        return self.head.id

    @property
    def key(self) -> tuple[bool, int]:
        """The stored message: moved requests lie in a stream of their own."""
        return self.request_class in MOVED_CLASSES, self.delivery.stream_seq


def decode_head(data: bytes) -> RequestHead:
    """Read the head of a request message. Raises WireError."""
    return decode(RequestHead, data)
