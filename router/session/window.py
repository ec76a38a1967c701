"""The window of one router session: the requests that it holds un-acked, their claims, pull credit, and permission to work."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

from headrace.broker.membership.members import Members
from headrace.broker.messages.control import Explanation, HistoryEntry, Inspection
from headrace.broker.messages.events import JobEvent, LoadReport
from headrace.broker.messages.requests import Choices, Finite, JobId, Name, Record, Small, Target, Token, Tokens, UnixTime
from headrace.broker.protocol.run import follow
from headrace.broker.protocol.runs import Tombstones
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Delivery, Messaging, PullLoop
from headrace.jetstream.subjects import BATCH_CLASSES, MOVED_CLASSES, RequestClass, Subjects
from headrace.router.index.follower import KvFollower
from headrace.router.index.sources import KvEventSources
from headrace.router.index.types import CacheView
from headrace.router.placement.types import Decision, Placement, Shed, Waiting, WorkerInfo
from headrace.router.session import metrics
from headrace.router.settings import SessionOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterDeps:
    """Dependencies of one router in one pool. `router` is the id of this session; `wall` returns Unix time.

    The owner of the session runs `members`.
    """

    messaging: Messaging
    subjects: Subjects
    members: Members
    pool: str
    router: str
    block_size: int = 0  # tokens of the pool's blocks; 0 = those of every worker
    options: SessionOptions = field(default_factory=SessionOptions)
    wall: Callable[[], float] = time.time


class SchedulingPort(Protocol):
    """Decides without I/O: `headrace.router.placement.scheduler.Scheduler`, or a random one. Times are of one clock."""

    several_tenants: bool  # more than one has requests in the stream before the window

    def put_worker(self, info: WorkerInfo, now_s: float) -> None: ...
    def remove_worker(self, worker: str, now_s: float) -> None: ...
    def set_routers(self, names: Iterable[str]) -> None:
        """Name the live routers of this pool; this one may be left out."""

    def on_report(self, report: LoadReport, now_s: float) -> None: ...
    def on_event(self, event: JobEvent, now_s: float) -> None: ...
    def place_now(self, request: Waiting, now_s: float) -> Placement | None:
        """Place a request that has just come, if nothing waits and nothing speaks against it; None: offer it."""

    def offer(self, request: Waiting, now_s: float) -> Shed | None:
        """Take a request into the window, or shed it at once."""

    def assess(self, request_id: str, *, limit: int, crashes: int) -> None:
        """Note what the judge of a waiting request says: its group limit, 0 = it is no suspect."""

    def cancel(self, ids: Iterable[str]) -> list[Waiting]:
        """Drop these requests. Return those that were waiting."""

    def decide(self, now_s: float) -> list[Decision]: ...
    def next_wake_s(self, now_s: float) -> float | None:
        """Return when `decide` should be called although nothing has happened; None if that is not needed."""

    def unplace(self, placement: Placement, now_s: float) -> None:
        """Take a request back into the window whose placement did not happen."""

    @property
    def waiting(self) -> int: ...
    @property
    def suspects_awaiting_lost(self) -> int:
        """The suspects that wait for workers to come back, since the only one left serves ordinary requests."""

    def explain(self, request_id: str, now_s: float) -> Explanation | None:
        """Explain the decision about a request, with `at` on the caller's clock; None if it is not known."""

    def queued_prefill_tokens(self, now_s: float) -> float:
        """Estimate the prompt tokens that are placed for prefill workers and not computed yet."""


@dataclass(frozen=True, slots=True)
class PoolIndex:
    """The index of one pool: `follower` writes into `view` the events that `events` keeps track of.

    The length of `entries` is the number of blocks in the index, counted once per worker and tier.
    """

    view: CacheView
    events: KvEventSources
    follower: KvFollower
    entries: Sized


# A request in the router's window: the part of its message that a router reads, and its states with their transitions.
#
# A request is in the window from its delivery on until its stored message is acknowledged or left to the server. Everything
# that changes its state stands in this file, and nothing outside it assigns `HeldRequest.state`; an illegal transition
# raises, because the caller has a bug.
#
#     WAITING ──place──> PLACING ──refuse──> REFUSING
#      │   ^               │                    ^
#      │   └──wait_again───┘                    │
#      │                                        │
#      └───────────────refuse───────────────────┘
#
#     each of these three ──leave──> GONE
#
# * `WAITING`: the scheduler has the request. Only in this state may it be cancelled, or make way for a later attempt. *
# `PLACING`: its message is being published to a worker, and the outcome must be known first. A worker whose queue is full
# sends the request back to `WAITING`; a message that the server can never store is refused. * `REFUSING`: its judge is being
# asked to end the request, and only the judge's answer allows the acknowledgement. * `GONE`: the window has removed it. A
# message that was displaced (its stream was deleted and made again) goes from any state; a placement or refusal of it that
# ends later changes nothing any more.


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
    key: tuple[bool, int] = (False, 0)  # the stored message; moved requests lie in a stream of their own
    size: int = 0
    gauge: Any = field(default=None, repr=False)
    state: RequestState = field(default=RequestState.WAITING, init=False)

    # State transitions. Each raises IllegalTransition if the table does not have it.

    def place(self) -> None:
        self.state = follow(TRANSITIONS, self.state, RequestState.PLACING)

    def wait_again(self) -> None:
        self.state = follow(TRANSITIONS, self.state, RequestState.WAITING)

    def refuse(self) -> None:
        self.state = follow(TRANSITIONS, self.state, RequestState.REFUSING)

    def leave(self) -> None:
        self.state = follow(TRANSITIONS, self.state, RequestState.GONE)

    @property
    def waiting(self) -> bool:
        return self.state is RequestState.WAITING

    @property
    def gone(self) -> bool:
        return self.state is RequestState.GONE

    @property
    def id(self) -> str:
        return self.head.id


# The requests a router holds un-acked: those that the server believes to be delivered to it, and until when it does.
#
# The claims on them are extended together, every third of the server's `ack_wait`. When that could not be done in time (the
# process was frozen, the connection gone), the server has given the requests to another consumer: then they are let go
# without an ack or nak, because that would speak about the other consumer's delivery.


class RequestWindow:
    """All requests that one router holds, by stored message and by id. Set `changed` to have them looked at soon.

    Each class has room of its own: a window full of ordinary requests must not keep urgent and moved ones out. That of batch
    requests is small, because no client waits for their first token.
    """

    def __init__(self, deps: RouterDeps, scheduler: SchedulingPort, lease: LeaseKeeper) -> None:
        self.pool = deps.pool
        self.scheduler = scheduler
        self.tombstones = Tombstones(keep_s=deps.options.timing.tombstone_s)
        self.changed = asyncio.Event()
        self.draining = False
        self._lease = lease
        self._options = deps.options
        self._ack_wait_s = deps.options.timing.ack_wait_s
        self._by_key: dict[tuple[bool, int], HeldRequest] = {}
        self._by_id: dict[str, HeldRequest] = {}
        self.counts: dict[str, int] = {}  # requests held, by class
        self._loop = asyncio.get_running_loop()
        self._extended_s = self._loop.time()
        self._gauges: dict[tuple[str, str], Any] = {}  # finding a labelled metric costs more than setting it
        self.bytes = 0
        metrics.WINDOW_BYTES.labels(self.pool).set_function(lambda: self.bytes)
        self._loops: dict[RequestClass, PullLoop] = {}
        self._allowed = False  # requests were asked for, the last time

    @property
    def lease_held(self) -> bool:
        return self._lease.held

    @property
    def granted(self) -> bool:
        """The permission to take and place requests: this router holds its lease and does not drain."""
        return self._lease.held and not self.draining

    def _gauge(self, request_class: str, tenant: str) -> Any:
        gauge = self._gauges.get((request_class, tenant))
        if gauge is None:
            gauge = self._gauges[request_class, tenant] = metrics.WINDOW.labels(self.pool, request_class, tenant)
        return gauge

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[HeldRequest]:
        return iter(list(self._by_key.values()))

    def of(self, request_id: str) -> HeldRequest | None:
        return self._by_id.get(request_id)

    def at(self, delivery: Delivery, request_class: RequestClass) -> HeldRequest | None:
        """Return the request held under the sequence of this delivery.

        It is another message's if the stream was deleted and made again.
        """
        return self._by_key.get((request_class in MOVED_CLASSES, delivery.stream_seq))

    def add(self, held: HeldRequest) -> None:
        """Hold one more request. Raises KeyError if another one of this id is held."""
        head = held.head
        if head.id in self._by_id:
            raise KeyError(head.id)
        held.key = held.request_class in MOVED_CLASSES, held.delivery.stream_seq
        held.size = len(held.delivery.data)
        held.gauge = self._gauge(held.request_class, metrics.tenant_label(head.tenant))
        self._by_key[held.key] = held
        self._by_id[head.id] = held
        self.counts[held.request_class] = self.counts.get(held.request_class, 0) + 1
        self.bytes += held.size
        held.gauge.inc()

    def remove(self, held: HeldRequest) -> bool:
        if held.state is RequestState.GONE:
            return False
        held.leave()
        del self._by_key[held.key]
        del self._by_id[held.head.id]
        self.counts[held.request_class] -= 1
        self.bytes -= held.size
        held.gauge.dec()
        return True

    def oldest_s(self, wall_s: float) -> float:
        return max(0.0, wall_s - min((held.head.created for held in self._by_key.values()), default=wall_s))

    # Claims: for how long the server believes that the requests are being worked on here.

    @property
    def claims_valid(self) -> bool:
        return self._loop.time() - self._extended_s < self._ack_wait_s

    def extend(self) -> None:
        """Tell the server that every request is being worked on. Call it only while connected: otherwise nothing is sent."""
        for held in self._by_key.values():
            held.delivery.progress()
        self._extended_s = self._loop.time()

    def restart_claims(self) -> None:
        """Count claims from now on, because no older request is held."""
        self._extended_s = self._loop.time()

    def inspection(self, router: str) -> Inspection:
        states = Counter(held.state.value for held in self)
        return Inspection(component=router, states=dict(states), lease_held=self.lease_held, draining=self.draining)

    # Credit of the pull loops.

    def pull(self, request_class: RequestClass, loop: PullLoop) -> None:
        """Ask for requests of this class by this loop."""
        self._loops[request_class] = loop

    def balance(self) -> None:
        """Ask for as many requests of each class as its window has room for. Call it whenever room or permission changes."""
        counts, options = self.counts, self._options
        allowed = self._allowed = self.granted and self.bytes < options.window_bytes
        for request_class, loop in self._loops.items():
            most = options.batch_window if request_class in BATCH_CLASSES else options.window
            wanted = max(0, most - counts.get(request_class, 0)) if allowed else 0
            if loop.credit < wanted or (loop.credit and not allowed):
                loop.add_credit(wanted - loop.credit)

    def _freed(self, request_class: RequestClass) -> None:
        """Ask for as many as there is room for after a request of this class has left. Quicker than `balance`."""
        options, loop = self._options, self._loops.get(request_class)
        if loop is None or not self._allowed or self.bytes >= options.window_bytes:
            self.balance()
            return
        most = options.batch_window if request_class in BATCH_CLASSES else options.window
        missing = most - self.counts[request_class] - loop.credit
        if missing > 0:
            loop.add_credit(missing)

    # The end of a request in the window: its stored message is acknowledged, or left to another consumer.

    def settle(self, held: HeldRequest, how: str = "") -> None:
        """Acknowledge the stored request: a worker has it now, or it has ended. `how` is the metric label of a drop, if any."""
        if self.remove(held):
            if how:
                metrics.DROPPED.labels(how).inc()
            held.delivery.ack()
            self._freed(held.request_class)

    def drop(self, held: HeldRequest, how: str) -> None:
        self.scheduler.cancel([held.id])
        self.settle(held, how)

    def give_back(self, held: HeldRequest) -> None:
        """Leave the request to another consumer: by a nak while the claim on it is ours, else when the server's claim ends."""
        ours = self.claims_valid
        if self.remove(held):
            metrics.DROPPED.labels("given_back" if ours else "let_go").inc()
            if ours:
                held.delivery.nak()
            self.balance()

    def give_back_waiting(self) -> None:
        """Give every waiting request back. In-flight placements finish, because their outcome must be known."""
        waiting = [held for held in self if held.waiting]
        self.scheduler.cancel([held.id for held in waiting])
        for held in waiting:
            self.give_back(held)
        self.restart_claims()
