"""Watches a deployment for the planner: members, load, queues, and events of requests become one observation per pool.

Arrivals follow from what is placed and what waits: those placed for the first time, and the growth of what is stored. No stream
counts them per pool, and this needs none of the requests' bytes. While the connection was away events are missing, so the
arrivals of that time are unknown.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import structlog

from headrace.broker.batches.record import BatchRecord
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages import JobEvents, LoadReport, Refused, Routed, WorkerMember
from headrace.broker.models.card_store import readable_members
from headrace.jetstream.errors import JetStreamError, SubjectError, TopologyError
from headrace.jetstream.ports import Message, Messaging, Subscription
from headrace.jetstream.subjects import MOVED_CLASSES, Subjects
from headrace.planner.observation import Observation, RequestSight, SightState, StepSight, WorkerSight
from headrace.planner.request_outcomes import RequestOutcomes
from headrace.top.facts import load_reports

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
        """Listen from now on."""
        prefix = self._names.prefix
        self._subscriptions = [
            await self._nats.subscribe(f"{prefix}.ev.*", self._on_events),
            await self._nats.subscribe(f"{prefix}.load.*.*", self._on_load),
            await self._nats.subscribe(self._names.refused_filter(), self._on_refused),
        ]
        await self._last_routed()

    async def stop(self) -> None:
        """Listen no more."""
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
            for key in keys:
                own = [one for one in here if one.fleet == key.fleet]
                ids = {one.worker for one in own}
                others = {one.worker for one in here} - ids
                arrived = None
                if growth is not None:
                    placed = sum(count for worker, count in heard.placed.items() if worker in ids)
                    arrived = max(0, placed + (growth if key == cheapest else 0))
                found[key] = Observation(
                    at=now,
                    model=self.known[key],
                    pool=str(key),
                    arrived=arrived,
                    refused=heard.refused if key == cheapest else 0,
                    waiting=None if waiting is None else stored if key == cheapest else 0,
                    workers=None if members is None else tuple(worker_sight(one, reports.get(one.worker), now) for one in own),
                    placed=tuple(
                        sight for worker, sight in heard.requests if worker in ids or (key == cheapest and worker not in others)
                    ),
                    outputs=tuple(tokens for worker, tokens in heard.outputs if worker in ids),
                    ended=tuple(outcome for worker, outcome in ended if worker in ids),
                    backlog=tuple(
                        (one.expires_at - now, one.queued)
                        for one in batches
                        if key == cheapest and one.model == self.known[key]
                    ),
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
            for subject, count in (
                await self._nats.subject_counts(self._names.stream("REQ"), self._names.all_of("req"))
            ).items():
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
    sight = WorkerSight(
        worker=member.worker,
        role=member.role,
        state=state,
        roles=tuple(member.roles),
        slots=member.slots,
        kv_tokens=member.blocks * member.block_size,
        start_s=member.start_s,
    )
    if report is None:
        return sight
    return WorkerSight(
        **{name: getattr(sight, name) for name in ("worker", "role", "state", "roles", "slots", "kv_tokens", "start_s")},
        running=report.running,
        waiting=report.waiting,
        kv_used=report.blocks_used / report.blocks_total if report.blocks_total else None,
        queued_prefill_tokens=report.queued_prefill_tokens,
        report_age_s=max(0.0, now - report.at),
    )


def step_sights(member: WorkerMember, reports: list[LoadReport]) -> list[StepSight]:
    """Return the engine steps that reports of a worker tell of."""
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
