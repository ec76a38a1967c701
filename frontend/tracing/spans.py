"""Turns the story of a request into spans: the request itself, and in it queue, start, prefill and decode of each attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import msgspec

from headrace.broker.messages import Story, StoryEvent
from headrace.frontend.tracing import names
from headrace.frontend.tracing.context import TraceContext, new_span_id

Service = Literal["headrace-frontend", "headrace-router", "headrace-worker", "nats-server"]
Value = str | int | float | bool | Sequence[str]
NS = 1_000_000_000


class SpanData(msgspec.Struct, frozen=True, kw_only=True):
    """A span, before any library knows it. Times are Unix nanoseconds. `links` are spans of the same trace."""

    name: str
    trace: int
    id: int
    parent: int  # 0 = none
    begin_ns: int
    end_ns: int
    service: Service
    instance: str
    kind: Literal["server", "internal", "consumer"] = "internal"
    attributes: Mapping[str, Value] = {}
    links: Sequence[int] = ()
    error: str = ""  # its message; empty = none
    remote_parent: bool = False


@dataclass(slots=True)
class Attempt:
    """The times of an attempt that were heard, in seconds since the submission."""

    number: int
    placed: StoryEvent | None = None
    started: StoryEvent | None = None
    prefilled: StoryEvent | None = None
    moved_s: float | None = None


def attempts_of(story: Story) -> list[Attempt]:
    """Return the attempts of a request in order. An event that names an attempt makes it; the first one of a kind counts."""
    found: dict[int, Attempt] = {}
    for event in sorted(story.events, key=lambda event: event.after_s):
        number = event.attempt
        if event.kind == "moved":  # names the attempt that is next: it ends the one before
            number = max((known for known in found if known < event.attempt), default=event.attempt - 1)
        attempt = found.setdefault(number, Attempt(number))
        if event.kind == "placed":
            attempt.placed = attempt.placed or event
        elif event.kind == "started":
            attempt.started = attempt.started or event
        elif event.kind == "prefilled":
            attempt.prefilled = attempt.prefilled or event
        elif event.kind == "moved" and attempt.moved_s is None:
            attempt.moved_s = event.after_s
    return [found[number] for number in sorted(found)]


def spans_of_story(story: Story, context: TraceContext, root: int, frontend: str) -> list[SpanData]:
    """Return the spans of one job below the span `root`. Each attempt but the first links to the run before it."""
    base_ns = int(story.submitted * NS)
    end_s = story.ended_s if story.ended_s is not None else 0.0
    made: list[SpanData] = []
    waits_from_s = 0.0
    previous_run = 0

    def add(
        name: str,
        begin_s: float,
        until_s: float,
        event: StoryEvent | None,
        attributes: Mapping[str, Value],
        links: Sequence[int] = (),
    ) -> int:
        by_router = name == "queue" and event is not None and bool(event.by)
        service: Service = "headrace-router" if by_router else "headrace-worker" if name != "queue" else "headrace-frontend"
        instance = (event.by if by_router else event.worker if name != "queue" else frontend) if event is not None else frontend
        begin_s = max(0.0, begin_s)
        span = SpanData(
            name=name,
            trace=context.trace,
            id=new_span_id(),
            parent=root,
            begin_ns=base_ns + int(begin_s * NS),
            end_ns=base_ns + int(max(begin_s, until_s) * NS),
            service=service,
            instance=instance,
            attributes={names.REQUEST_ID: story.id, **attributes},
            links=links,
        )
        made.append(span)
        return span.id

    def at(event: StoryEvent) -> float:
        return min(event.after_s, end_s)  # the last events are heard after the end

    attempts = attempts_of(story)
    for attempt, following in zip_longest(attempts, attempts[1:]):
        over_s = _over_s(attempt, following, end_s)
        placed, started, prefilled = attempt.placed, attempt.started, attempt.prefilled
        first = placed or started
        if first is None:
            waits_from_s = over_s
            continue
        about: dict[str, Value] = {names.ATTEMPT: attempt.number, names.WORKER: first.worker}
        if first.rank is not None:
            about[names.RANK] = first.rank
        # a worker that places a request on itself tells of it after the start
        placed_s = min(at(first), at(started)) if started is not None else at(first)
        add("queue", waits_from_s, placed_s, placed, {names.POOL: story.pool, **about, **_decision(placed)})
        waits_from_s = over_s
        if started is None:
            continue
        add("start", placed_s, at(started), started, about)
        links = (previous_run,) if previous_run else ()
        if prefilled is None:
            previous_run = add("prefill", at(started), over_s, started, about, links)
        else:
            ready_s = max(at(started), at(prefilled) - prefilled.fetch_ms / 1e3)
            add("prefill", at(started), ready_s, prefilled, {**about, names.UNCACHED: prefilled.uncached}, links)
            if prefilled.fetch_ms:
                add("transfer", ready_s, at(prefilled), prefilled, about)
            previous_run = add("decode", at(prefilled), over_s, prefilled, about, links)
    if not made:  # it ended in the queue
        add("queue", 0.0, end_s, None, {names.POOL: story.pool})
    return made


def _over_s(attempt: Attempt, following: Attempt | None, end_s: float) -> float:
    """Return when an attempt was over: when its request moved, the next attempt was first heard of, or the request ended."""
    ends = [end_s]
    if attempt.moved_s is not None:
        ends.append(attempt.moved_s)
    if following is not None:
        ends += [event.after_s for event in (following.placed, following.started) if event is not None]
    return min(ends)


def _decision(placed: StoryEvent | None) -> dict[str, Value]:
    """Return what is known of a router's decision."""
    known: dict[str, Value] = {}
    if placed is not None and placed.by:
        known = {names.ROUTER: placed.by, names.UNCACHED_PREDICTED: placed.uncached}
    if placed is not None and placed.prefill:
        known[names.PREFILL_WORKER] = placed.prefill
    return known
