"""Spans of a request: W3C trace contexts, attribute names, and the spans made from its timeline.

The GenAI conventions still change; their names are used here and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from random import Random
from typing import Literal

import msgspec

from headrace.broker.messages.control import Story, StoryEvent

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
FIRST_CHUNK_S = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"
METHOD = "http.request.method"
ROUTE = "http.route"
STATUS = "http.response.status_code"

REQUEST_ID = "headrace.request.id"
CLIENT_REQUEST_ID = "headrace.request.client_id"
POOL = "headrace.pool"
TENANT = "headrace.tenant"
REQUEST_CLASS = "headrace.request_class"
ATTEMPTS = "headrace.attempts"
LEVEL = "headrace.service_level"
ATTEMPT = "headrace.attempt"
WORKER = "headrace.worker"
ROUTER = "headrace.router"
RANK = "headrace.worker.rank"
PREFILL_WORKER = "headrace.prefill.worker"
UNCACHED_PREDICTED = "headrace.prefill.predicted_tokens"
UNCACHED = "headrace.prefill.tokens"

MESSAGING_SYSTEM = "messaging.system"
MESSAGING_DESTINATION = "messaging.destination.name"
MESSAGE_ID = "messaging.message.id"

_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
    "/inference/v1/generate": "text_completion",
    "/v1/images/generations": "generate_content",
    "/v1/videos": "generate_content",
    "/v1/audio/transcriptions": "generate_content",
    "/v1/audio/translations": "generate_content",
}
_CHATS = ("/v1/chat/completions", "/v1/responses", "/v1/responses/compact", "/v1/messages", "/api/chat")


def operation(route: str) -> str:
    """Return the GenAI operation of a generating route; routes of vectors and scores are `embeddings`."""
    return "chat" if route in _CHATS else _OPERATIONS.get(route, "embeddings")


_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\Z")
_STATE = re.compile(r"[\x20-\x7e]*\Z")
MOST_STATE = 512  # characters: a longer one is dropped, as the recommendation allows
SAMPLED = 0x01

_bits = Random().getrandbits  # noqa: S311  # seeded by the system; ids are no secrets


class TraceContext(msgspec.Struct, frozen=True):
    """A place in a trace. `span` is the caller's span, or 0 where the trace begins here."""

    trace: int
    span: int
    sampled: bool
    state: str = ""

    def headers(self, span: int) -> dict[str, str]:
        """Return the headers that make what they are sent to a child of `span`."""
        flags = SAMPLED if self.sampled else 0
        headers = {"traceparent": f"00-{self.trace:032x}-{span:016x}-{flags:02x}"}
        return headers | {"tracestate": self.state} if self.state else headers


def read_context(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """Return the context in the headers of a request; None without one, or for one that is not well-formed."""
    parents: list[bytes] = []
    states: list[bytes] = []
    for name, value in headers:
        if name == b"traceparent":
            parents.append(value)
        elif name == b"tracestate":
            states.append(value)
    if len(parents) != 1:
        return None
    found = _PARENT.match(parents[0].decode("latin-1"))
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace, span = int(found[2], 16), int(found[3], 16)
    if not trace or not span:
        return None
    state = b",".join(states).decode("latin-1").strip()
    if len(state) > MOST_STATE or not _STATE.match(state):
        state = ""
    return TraceContext(trace, span, bool(int(found[4], 16) & SAMPLED), state)


def new_span_id() -> int:
    """Return 64 random bits that are not 0."""
    return _bits(64) or 1


def new_context(share: float) -> TraceContext:
    """Begin a trace, sampled with probability `share`."""
    trace = _bits(128) or 1
    return TraceContext(trace, 0, (trace & (2**56 - 1)) < share * 2**56)


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
            attributes={REQUEST_ID: story.id, **attributes},
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
        about: dict[str, Value] = {ATTEMPT: attempt.number, WORKER: first.worker}
        if first.rank is not None:
            about[RANK] = first.rank
        # a worker that places a request on itself tells of it after the start
        placed_s = min(at(first), at(started)) if started is not None else at(first)
        add("queue", waits_from_s, placed_s, placed, {POOL: story.pool, **about, **_decision(placed)})
        waits_from_s = over_s
        if started is None:
            continue
        add("start", placed_s, at(started), started, about)
        links = (previous_run,) if previous_run else ()
        if prefilled is None:
            previous_run = add("prefill", at(started), over_s, started, about, links)
        else:
            ready_s = max(at(started), at(prefilled) - prefilled.fetch_ms / 1e3)
            add("prefill", at(started), ready_s, prefilled, {**about, UNCACHED: prefilled.uncached}, links)
            if prefilled.fetch_ms:
                add("transfer", ready_s, at(prefilled), prefilled, about)
            previous_run = add("decode", at(prefilled), over_s, prefilled, about, links)
    if not made:  # it ended in the queue
        add("queue", 0.0, end_s, None, {POOL: story.pool})
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
    known: dict[str, Value] = {}
    if placed is not None and placed.by:
        known = {ROUTER: placed.by, UNCACHED_PREDICTED: placed.uncached}
    if placed is not None and placed.prefill:
        known[PREFILL_WORKER] = placed.prefill
    return known
