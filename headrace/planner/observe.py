"""Observes a deployment for the planner: one observation per pool. Unknown values are None and never 0."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import structlog

from headrace.broker.batches.record import BatchRecord
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages.control import Routed
from headrace.broker.messages.events import JobEvent, JobEvents, LoadReport, Refused
from headrace.broker.messages.members import WorkerMember
from headrace.broker.models.card_store import readable_members
from headrace.jetstream.errors import JetStreamError, SubjectError, TopologyError
from headrace.jetstream.ports import Message, Messaging, Subscription
from headrace.jetstream.subjects import MOVED_CLASSES, Subjects
from headrace.top import load_reports

ROLES: tuple[str, ...] = ("aggregated", "prefill", "decode")
SightState = Literal["serving", "draining", "asleep", "waking", "paused"]

LEAST_SEEN = 0.5  # of the serving workers: with fewer fresh reports the load of a pool is unknown


class WorkerSight(msgspec.Struct, frozen=True, kw_only=True):
    """A worker and its last load report. `report_age_s` None: it has reported nothing yet.

    `roles`: those that it can change to.
    """

    worker: str
    role: str
    state: SightState = "serving"
    roles: tuple[str, ...] = ()
    slots: int = 0
    running: int = 0
    waiting: int = 0
    kv_used: float | None = None  # share of its KV blocks
    kv_tokens: int = 0  # tokens that its KV blocks hold, 0 = unknown
    queued_prefill_tokens: int = 0
    report_age_s: float | None = None
    start_s: float = 0.0  # its own start-up took so long, 0 = unknown

    @property
    def held(self) -> int:
        return self.running + self.waiting


class StepSight(msgspec.Struct, frozen=True, kw_only=True):
    """An engine step as a load report tells of it. `context_tokens`: tokens in its KV blocks."""

    step_s: float
    prefill_tokens: int
    decodes: int
    context_tokens: int = 0


class RequestSight(msgspec.Struct, frozen=True, kw_only=True):
    """A placed request: tokens of its prompt, those that had to be computed, and how long it had waited."""

    prompt: int
    uncached: int
    waited_s: float = 0.0


class OutcomeSight(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has ended: from its arrival to its first token, and the mean time between its tokens."""

    ttft_s: float
    itl_s: float = 0.0


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of a model at one time (Unix). The key of all state is (model, pool).

    `arrived`: requests that arrived since the last observation, those refused at the queue's cap included. `waiting`: requests
    that are stored and not placed, those in routers' windows included. `backlog`: batch work, (seconds until due, requests).
    """

    at: float
    model: str
    pool: str
    arrived: int | None = None
    refused: int = 0
    waiting: int | None = None
    workers: tuple[WorkerSight, ...] | None = None
    placed: tuple[RequestSight, ...] = ()
    outputs: tuple[int, ...] = ()  # tokens of answers that ended since the last observation
    ended: tuple[OutcomeSight, ...] = ()  # requests that ended since the last observation, as far as their times are known
    steps: tuple[StepSight, ...] = ()
    backlog: tuple[tuple[float, int], ...] = ()
    price: float = 0.0  # of one worker for an hour, 0 = not given

    def of_role(self, role: str, *states: SightState) -> list[WorkerSight]:
        """Return the workers of a role that are in one of these states, `serving` if none is named."""
        wanted = states or ("serving",)
        return [one for one in self.workers or () if one.role == role and one.state in wanted]


def stale(workers: Iterable[WorkerSight], *, fresh_s: float) -> bool:
    """Return True if too few of the serving workers have reported lately to decide anything by their load.

    A worker that has never reported has just joined: it counts as supply, and says nothing.
    """
    known = [one for one in workers if one.state == "serving" and one.report_age_s is not None]
    fresh = [one for one in known if one.report_age_s is not None and one.report_age_s <= fresh_s]
    return bool(known) and len(fresh) < LEAST_SEEN * len(known)


# Derives from the events of requests how long their first tokens took, and the time between two tokens.
#
# Times are those at which events were heard. How long a request waited before it was placed is told by the routers' records
# alone: without routers its time begins when it is placed. Of one whose beginning was not heard nothing is derived.

MOST = 20_000  # requests of a queue that are followed at once, and that end between two looks


@dataclass(slots=True)
class _Followed:
    placed_s: float
    waited_s: float = 0.0
    first_s: float | None = None  # when its prompt was computed
    itl_s: float = 0.0
    worker: str = ""  # that ended it


class RequestOutcomes:
    """The open requests of a queue, and those that have ended since the last look."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, _Followed] = OrderedDict()
        self._ended: dict[str, _Followed] = {}

    def on_event(self, event: JobEvent, now: float) -> None:
        """Note an event. A request that moves is followed on: the time that it loses by that is part of its times."""
        followed = self._open.get(event.id)
        if followed is None:
            if event.kind == "placed" and event.attempt == 1:
                self._open[event.id] = _Followed(now)
                if len(self._open) > MOST:
                    self._open.popitem(last=False)
        elif event.kind == "prefilled" and followed.first_s is None:
            followed.first_s = now
        elif event.kind == "settled":
            del self._open[event.id]
            if followed.first_s is not None and len(self._ended) < MOST:
                followed.worker, followed.itl_s = event.worker, (now - followed.first_s) / max(1, event.tokens - 1)
                self._ended[event.id] = followed

    def waited(self, request_id: str, seconds: float) -> None:
        """Note how long a request had waited when it was placed."""
        followed = self._open.get(request_id) or self._ended.get(request_id)
        if followed is not None:
            followed.waited_s = seconds

    def take(self) -> list[tuple[str, OutcomeSight]]:
        """Return the requests that have ended since the last look, with the workers that ended them."""
        ended, self._ended = self._ended, {}
        return [
            (one.worker, OutcomeSight(ttft_s=max(0.0, one.first_s - one.placed_s) + one.waited_s, itl_s=max(0.0, one.itl_s)))
            for one in ended.values()
            if one.first_s is not None
        ]


# Watches a deployment for the planner: members, load, queues, and events of requests become one observation per pool.
#
# Arrivals follow from what is placed and what waits: those placed for the first time, and the growth of what is stored. No
# stream counts them per pool, and this needs none of the requests' bytes. While the connection was away events are missing,
# so the arrivals of that time are unknown.

log = structlog.get_logger()

MOST_SEEN = 20_000  # events or steps of one pool between two looks
STEP_EVERY_S = 0.5  # of each worker, at most
ROUTED_AT_ONCE = 1_000
BATCHES_EVERY_S = 30.0

_batch = msgspec.json.Decoder(BatchRecord)


class PoolKey(NamedTuple):
    """A pool of a model: the id of the model's queue, and the fleet that serves it ("" where there is one only)."""

    model: str
    fleet: str = ""

    def __str__(self) -> str:
        return f"{self.model}.{self.fleet}" if self.fleet else self.model


@dataclass(slots=True)
class _Events:
    """The events heard of a queue since the last look."""

    placed: dict[str, int] = field(default_factory=dict)  # first placements, by worker
    requests: list[tuple[str, RequestSight]] = field(default_factory=list)  # with the worker that each was placed on
    outputs: list[tuple[str, int]] = field(default_factory=list)
    reports: dict[str, list[LoadReport]] = field(default_factory=dict)
    outcomes: RequestOutcomes = field(default_factory=RequestOutcomes)  # kept from look to look
    refused: int = 0


class DeploymentWatch:
    """The watch over one connection. Call `start` once, then `observe` at each tick."""

    def __init__(self, messaging: Messaging, names: Subjects, *, wall: Callable[[], float] = time.time) -> None:
        """`wall` returns Unix time."""
        self._nats = messaging
        self._names = names
        self._wall = wall
        self._events: dict[str, _Events] = {}
        self._heard_s: dict[str, float] = {}  # when a report of a worker was kept last
        self._waiting: dict[str, int] = {}
        self._batches: tuple[float, list[BatchRecord]] = (0.0, [])
        self._routes_made: str | None = None  # when the stream of placement records was; "": there is none
        self._listens_from = 0  # the last placement record from before `start`
        self._routed: dict[str, int] = {}  # queue -> the last of its placement records that was read
        self._since_s: float | None = None  # connection time at the last look
        self._subscriptions: list[Subscription] = []
        self.prices: dict[PoolKey, float] = {}  # of one worker; a pool without workers keeps the last one
        self.known: dict[PoolKey, str] = {}  # pools that were seen, and the names of their models

    async def start(self) -> None:
        prefix = self._names.prefix
        self._subscriptions = [
            await self._nats.subscribe(f"{prefix}.ev.*", self._on_events),
            await self._nats.subscribe(f"{prefix}.load.*.*", self._on_load),
            await self._nats.subscribe(self._names.refused_filter(), self._on_refused),
        ]
        await self._last_routed()

    async def stop(self) -> None:
        for one in self._subscriptions:
            with contextlib.suppress(JetStreamError):
                await one.unsubscribe()

    async def observe(self) -> dict[PoolKey, Observation]:
        """Look at everything once. What cannot be read is None in the observations."""
        now = self._wall()
        unbroken = self._since_s == self._nats.connected_since_s
        self._since_s = self._nats.connected_since_s
        members = await self._members()
        reports = await load_reports(self._nats, self._names, members or [])
        waiting = await self._stored()
        batches = await self._open_batches(now)
        routed = await self._last_routed()
        for member in members or []:
            key = PoolKey(member.pool, member.fleet)
            self.known.setdefault(key, member.model)
            self.prices[key] = member.price
        found: dict[PoolKey, Observation] = {}
        for queue in sorted({key.model for key in self.known}):
            heard = self._events.pop(queue, _Events())
            self._events[queue] = _Events(outcomes=heard.outcomes)
            await self._read_waits(queue, heard, routed)
            ended = heard.outcomes.take()
            keys = sorted(key for key in self.known if key.model == queue)
            here = [one for one in members or [] if one.pool == queue]
            cheapest = min(keys, key=lambda key: (min((m.price for m in here if m.fleet == key.fleet), default=0.0), key.fleet))
            before, stored = self._waiting.get(queue), (waiting or {}).get(queue, 0)
            growth = stored - before if waiting is not None and before is not None and unbroken else None
            if waiting is not None:
                self._waiting[queue] = stored
            for key in keys:  # the work that is on no worker is for the cheapest
                model, first = self.known[key], key == cheapest
                own = [one for one in here if one.fleet == key.fleet]
                ids = {one.worker for one in own}
                others = {one.worker for one in here} - ids
                placed = sum(count for worker, count in heard.placed.items() if worker in ids)
                found[key] = Observation(
                    at=now,
                    model=model,
                    pool=str(key),
                    arrived=None if growth is None else max(0, placed + growth * first),
                    refused=heard.refused * first,
                    waiting=None if waiting is None else stored * first,
                    workers=None if members is None else tuple(worker_sight(one, reports.get(one.worker), now) for one in own),
                    placed=tuple(one for worker, one in heard.requests if worker in ids or (first and worker not in others)),
                    outputs=tuple(tokens for worker, tokens in heard.outputs if worker in ids),
                    ended=tuple(outcome for worker, outcome in ended if worker in ids),
                    backlog=tuple((one.expires_at - now, one.queued) for one in batches if first and one.model == model),
                    price=self.prices.get(key, 0.0),
                    steps=tuple(step for one in own for step in step_sights(one, heard.reports.get(one.worker, []))),
                )
        return found

    async def _members(self) -> list[WorkerMember] | None:
        try:
            return list(readable_members(await self._nats.bucket(self._names.bucket("members")).entries("worker.>")))
        except JetStreamError as error:
            log.warning("planner.members_unreadable", error=str(error))
            return None

    async def _stored(self) -> dict[str, int] | None:
        """Return the requests that wait, by queue. Moved ones were counted when they first arrived."""
        stored: dict[str, int] = {}
        try:
            counts = await self._nats.subject_counts(self._names.stream("REQ"), self._names.all_of("req"))
            for subject, count in counts.items():
                with contextlib.suppress(SubjectError):
                    request = self._names.parse_req(subject)
                    if request.request_class not in MOVED_CLASSES:
                        stored[request.pool] = stored.get(request.pool, 0) + count
        except JetStreamError as error:
            log.warning("planner.queues_unreadable", error=str(error))
            return None
        return stored

    async def _open_batches(self, now: float) -> list[BatchRecord]:
        """Return the batches with open lines: those that wait, are claimed or run alike."""
        if now - self._batches[0] >= BATCHES_EVERY_S:
            records: list[BatchRecord] = []
            with contextlib.suppress(JetStreamError):
                for entry in await self._nats.bucket(self._names.bucket("batches")).entries(">"):
                    with contextlib.suppress(msgspec.MsgspecError):
                        records.append(_batch.decode(entry.value))
                self._batches = (now, [one for one in records if one.status == "in_progress" and one.queued])
        return self._batches[1]

    async def _last_routed(self) -> int | None:
        """Return the sequence of the last placement record of all queues, 0 where there is none, None where that is unknown."""
        created, last = "", 0
        try:
            state = await self._nats.stream_state(self._names.stream("ROUTE"))
            created, last = state.created, state.last_seq
        except TopologyError:
            pass  # a router makes the stream later
        except JetStreamError as error:
            log.warning("planner.placements_unreadable", error=str(error))
            return None
        if self._routes_made is None:
            self._listens_from = last
        elif created != self._routes_made:  # its numbers begin anew
            self._listens_from = 0
            self._routed.clear()
        self._routes_made = created
        return last

    async def _read_waits(self, queue: str, heard: _Events, last: int | None) -> None:
        """Read how long requests waited from the routers' records, if there are any: events say the rest.

        `last` is the sequence of the last record of all queues.
        """
        read_up_to = self._routed.get(queue, self._listens_from)
        if last is None or last <= read_up_to:
            return
        records: list[tuple[str, RequestSight]] = []
        try:
            while len(records) < MOST_SEEN:
                read = await self._nats.subject_messages(
                    self._names.stream("ROUTE"), self._names.route(queue), limit=ROUTED_AT_ONCE, start_seq=read_up_to + 1
                )
                for message in read:
                    self._routed[queue] = read_up_to = message.seq
                    with contextlib.suppress(WireError):
                        one = decode(Routed, message.data)
                        sight = RequestSight(prompt=one.tokens, uncached=one.uncached, waited_s=one.waited_s)
                        records.append((one.worker, sight))
                        if one.attempt == 1:
                            heard.outcomes.waited(one.id, one.waited_s)
                if len(read) < ROUTED_AT_ONCE:
                    break
            else:
                if last > read_up_to:  # what has been stored since the end was asked for is left to the next look
                    log.warning("planner.placements_left_out", pool=queue, read=len(records), after=read_up_to, up_to=last)
                    self._routed[queue] = last
        except JetStreamError as error:
            log.warning("planner.placements_unreadable", error=str(error))
        if records:
            heard.requests = records

    def _on_events(self, message: Message) -> None:
        heard, now = self._events.setdefault(message.subject.rpartition(".")[2], _Events()), self._wall()
        with contextlib.suppress(WireError):
            for event in decode(JobEvents, message.data).events:
                heard.outcomes.on_event(event, now)
                if event.kind == "placed" and event.attempt == 1:
                    heard.placed[event.worker] = heard.placed.get(event.worker, 0) + 1
                    if len(heard.requests) < MOST_SEEN:
                        uncached = event.uncached if event.by else event.tokens
                        heard.requests.append((event.worker, RequestSight(prompt=event.tokens, uncached=uncached)))
                elif event.kind == "settled" and len(heard.outputs) < MOST_SEEN:
                    heard.outputs.append((event.worker, event.tokens))

    def _on_refused(self, message: Message) -> None:
        heard = self._events.setdefault(message.subject.rpartition(".")[2], _Events())
        with contextlib.suppress(WireError):
            heard.refused += min(MOST_SEEN, decode(Refused, message.data).count)

    def _on_load(self, message: Message) -> None:
        """Keep a report of each worker every now and then: steps teach, and a thousand workers send five a second each."""
        _, _, rest = message.subject.partition(".load.")
        queue, _, worker = rest.partition(".")
        now = self._wall()
        if now - self._heard_s.get(worker, 0.0) < STEP_EVERY_S:
            return
        self._heard_s[worker] = now
        heard = self._events.setdefault(queue, _Events())
        with contextlib.suppress(WireError):
            reports = heard.reports.setdefault(worker, [])
            if len(reports) < 100:
                reports.append(decode(LoadReport, message.data))


def worker_sight(member: WorkerMember, report: LoadReport | None, now: float) -> WorkerSight:
    """Return a worker as the planner sees it. `now` is Unix time."""
    state: SightState = "serving"
    if member.sleeping:
        state = "waking" if member.waking else "asleep"
    elif member.paused:
        state = "paused"
    elif member.draining:
        state = "draining"
    return WorkerSight(
        worker=member.worker,
        role=member.role,
        state=state,
        roles=tuple(member.roles),
        slots=member.slots,
        kv_tokens=member.blocks * member.block_size,
        start_s=member.start_s,
        running=report.running if report is not None else 0,
        waiting=report.waiting if report is not None else 0,
        kv_used=report.blocks_used / report.blocks_total if report is not None and report.blocks_total else None,
        report_age_s=max(0.0, now - report.at) if report is not None else None,
    )


def step_sights(member: WorkerMember, reports: list[LoadReport]) -> list[StepSight]:
    return [
        StepSight(
            step_s=one.step_s,
            prefill_tokens=one.step_prefill_tokens,
            decodes=one.step_decodes,
            context_tokens=one.blocks_used * member.block_size,
        )
        for one in reports
        if one.step_s > 0 and one.step_prefill_tokens + one.step_decodes > 0
    ]
