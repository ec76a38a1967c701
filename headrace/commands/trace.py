"""The commands `headrace trace` and `headrace router explain|status`: the timeline of a request and its placements."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from headrace.base.errors import EXIT_OK, CommandError
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages.control import (
    Candidate,
    Decided,
    Explain,
    Explanation,
    FleetDecision,
    Inspect,
    Inspection,
    Routed,
    Stories,
    Story,
    StoryEvent,
    TellStories,
)
from headrace.broker.messages.members import IngressMember, RouterMember
from headrace.broker.messages.requests import PrefillDecision
from headrace.commands.control import ask_all, ask_subjects, columns, connected, located_settings, request_id
from headrace.config.build_settings import add_setting_flags
from headrace.config.settings import Settings
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import RequestTimeout
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects


def explain_request(settings: Settings, request: str, *, as_json: bool) -> int:
    """Run `headrace router explain`. Raises CommandError when no router knows the request."""
    wanted = request_id(request)

    async def ask(messaging: Messaging, names: Subjects) -> tuple[int, list[Explanation]]:
        routers = await live_routers(messaging, names)
        answers = await ask_all(messaging, names, _ids(routers), Explain(id=wanted), Explanation)
        return len(routers), [answer for answer in answers if answer is not None and answer.known]

    asked, known = connected(settings, ask, name="headrace router")
    if not asked:
        raise CommandError("no router is running: workers place requests on themselves")
    if not known:
        raise CommandError(f"none of {asked} routers remembers the request {wanted!r}; they keep their last decisions only")
    if as_json:
        sys.stdout.write(json.dumps([msgspec.to_builtins(explanation) for explanation in known], indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(map(explained, chronology(known))))
    return EXIT_OK


def show_routers(settings: Settings, *, as_json: bool) -> int:
    async def ask(messaging: Messaging, names: Subjects) -> list[tuple[RouterMember, Inspection | None]]:
        routers = await live_routers(messaging, names)
        states = await ask_all(messaging, names, _ids(routers), Inspect(), Inspection)
        return list(zip(routers, states, strict=True))

    found = connected(settings, ask, name="headrace router")
    if as_json:
        rows: list[dict[str, Any]] = [
            {"router": member.router, "pool": member.pool, "state": msgspec.to_builtins(state) if state else None}
            for member, state in found
        ]
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return EXIT_OK
    table = [["router", "pool", "lease", "waiting", "placing", "refusing"]]
    for member, state in found:
        held = ["no answer", "", "", ""]
        if state is not None:
            lease = "draining" if state.draining else "held" if state.lease_held else "lost"
            held = [lease, *(str(state.states.get(name, 0)) for name in ("waiting", "placing", "refusing"))]
        table.append([member.router, member.pool, *held])
    sys.stdout.write(columns(table) if found else "no router is running: workers place requests on themselves\n")
    return EXIT_OK


async def live_routers(messaging: Messaging, names: Subjects) -> list[RouterMember]:
    """Return the routers that hold a lease now, sorted by pool and id."""
    entries = await messaging.bucket(names.bucket("members")).entries("router.>")
    found = []
    for entry in entries:
        with contextlib.suppress(WireError):  # one that cannot be read answers no question
            found.append(decode(RouterMember, entry.value))
    return sorted(found, key=lambda member: (member.pool, member.router))


def chronology(told: Iterable[Explanation]) -> list[Decided]:
    """Return the decisions of all routers, oldest first: a request that moved was placed more than once."""
    decided: list[Decided] = [one for last in told for one in (*last.earlier, last)]
    return sorted(decided, key=lambda one: (one.at, one.attempt))


def explained(told: Decided) -> str:
    head = told.id + (f", attempt {told.attempt}" if told.attempt > 1 else "") + f": {told.state or 'known'}"
    if told.worker:
        head += f" on {told.worker}"
    lines = [
        head,
        f"  by {told.router}, policy {told.policy or 'unknown'}" + (f", reason {told.reason}" if told.reason else ""),
        f"  {_times(told)}",
    ]
    if told.name:
        lines.insert(1, f"  the client's id is {told.name}")
    if told.prefill is not None:
        lines.append(f"  prompt computed {_prefilled(told.prefill)}")
    if told.fleet is not None:
        lines.append(f"  {_fleets(told.fleet)}")
    if not told.candidates:
        return "\n".join([*lines, "  no candidates\n"])
    rows = [["", "worker", "device", "host", "disk", "uncached", "pending", "running", "wait s", "cost s", ""]]
    rows += [_row(candidate, chosen=candidate.worker == told.worker) for candidate in _best_first(told)]
    return "\n".join([*lines, *(f"  {line}" for line in columns(rows).splitlines())]) + "\n"


def _times(told: Decided) -> str:
    words = f"waited {told.waited_s:.3f} s in the window, {told.since_arrival_s:.3f} s after the request arrived"
    if told.state == "placed":
        words += f"; predicted first token {max(told.predicted_ttft_s - told.since_arrival_s, 0.0):.3f} s after the placement"
    return words


def _prefilled(decision: PrefillDecision) -> str:
    where = f"by {decision.worker or 'any prefill worker'}" if decision.remote else "by the worker that answers"
    return where + (f", reason {decision.reason}" if decision.reason else "")


def _fleets(decision: FleetDecision) -> str:
    targets = f"targets {decision.ttft_target_s:g} s to the first token, {decision.itl_target_s:g} s between two"
    options = [
        f"{one.fleet} {one.state}" + ("" if one.ttft_s < 0 else f" ({one.ttft_s:.3f} s, {one.itl_s:.3f} s)")
        for one in sorted(decision.options, key=lambda one: one.rank)
    ]
    return f"fleet {decision.fleet}, reason {decision.reason}; {'; '.join([targets, *options])}"


def _best_first(told: Decided) -> list[Candidate]:
    return sorted(told.candidates, key=lambda c: (c.worker != told.worker, bool(c.why_not), not c.room, c.cost_s))


def _row(candidate: Candidate, *, chosen: bool) -> list[str]:
    c = candidate
    numbers = [str(n) for n in (c.device, c.host, c.disk, c.uncached, c.pending, c.running)]
    note = c.why_not or ("" if c.room else "no room")
    return ["→" if chosen else "", c.worker, *numbers, f"{c.wait_s:.3f}", f"{c.cost_s:.3f}", note]


def _ids(routers: list[RouterMember]) -> list[str]:
    return [member.router for member in routers]


BAR = 60  # characters of the timeline

StageName = Literal["queue", "prefill", "transfer", "decode", "move"]
MARKS: dict[StageName, str] = {"queue": ".", "prefill": "=", "transfer": ">", "decode": "#", "move": "!"}


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a request's life. Times are seconds since its submission."""

    name: StageName
    begin_s: float
    end_s: float
    worker: str = ""

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def in_order(story: Story) -> list[StoryEvent]:
    """Return the events in order. A worker that places a request on itself reports the placement after the start."""
    started = {event.attempt: event.after_s for event in story.events if event.kind == "started"}

    def key(event: StoryEvent) -> tuple[float, bool]:
        placed = event.kind == "placed"
        return min(event.after_s, started.get(event.attempt, event.after_s)) if placed else event.after_s, not placed

    return sorted(story.events, key=key)


def stages(story: Story, now_s: float) -> list[Stage]:
    """Return the stages of a request, one behind the other, from its submission to its end or, if it is open, `now_s`.

    It waits until an attempt has started, is in prefill until that attempt's first token and in decode until it ends or moves.
    Events of older attempts that come late change nothing.
    """
    found: list[Stage] = []
    name: StageName = "queue"
    begin_s, worker, attempt = 0.0, "", 0

    def close(at_s: float, following: StageName, its_worker: str) -> None:
        nonlocal name, begin_s, worker
        found.append(Stage(name, begin_s, at_s, worker))
        name, begin_s, worker = following, at_s, its_worker

    last_s = story.ended_s if story.ended_s is not None else now_s
    for event in in_order(story):
        at_s = max(begin_s, min(event.after_s, last_s))  # the last events are heard after the end
        if event.kind == "started" and event.attempt > attempt:
            attempt = event.attempt
            close(at_s, "prefill", event.worker)
        elif event.kind == "prefilled" and event.attempt == attempt and name == "prefill":
            if event.fetch_ms:
                close(max(begin_s, at_s - event.fetch_ms / 1e3), "transfer", event.worker)
            close(at_s, "decode", event.worker)
        elif event.kind == "moved" and event.attempt >= attempt and name in ("prefill", "decode"):
            close(at_s, "move", "")
    return [*found, Stage(name, begin_s, max(begin_s, last_s), worker)]


def timeline(parts: Sequence[Stage], width: int = BAR) -> str:
    """Draw the stages to scale in one line; a stage that is not empty has a character at least."""
    total = parts[-1].end_s
    if total <= 0:
        return ""
    drawn, at = "", 0
    for part in parts:
        length = round(part.end_s / total * width) - at  # ends are rounded, so that errors do not add up
        drawn += MARKS[part.name] * max(length, 1 if part.seconds > 0 else 0)
        at = len(drawn)
    return drawn


def story_text(story: Story, decided: Iterable[Decided], now_s: float) -> str:
    """Return the story of one request, with the reasons of the placements that routers remember."""
    parts = stages(story, now_s)
    lines = [f"{story.id}: {_end(story)}", *_about(story), ""]
    lines.append(_line(0.0, f"submitted to frontend {story.ingress}"))
    lines += [_line(event.after_s, _told(event, story)) for event in in_order(story)]
    if story.lost_events:
        lines.append(f"            and {story.lost_events} events more")
    if story.ended_s is not None:
        lines.append(_line(story.ended_s, _end(story)))
    lines += ["", f"  {timeline(parts)}", f"  {_sums(parts)}"]
    for one in decided:
        lines += ["", *explained(one).rstrip().splitlines()]
    return "\n".join(lines) + "\n"


def placements_text(name: str, records: Sequence[Routed]) -> str:
    """Return the stored placements of a request that no frontend remembers."""
    lines = [f"{name}: no frontend remembers it; its placements were stored:"]
    for one in sorted(records, key=lambda record: (record.at, record.attempt)):
        at = datetime.fromtimestamp(one.at, UTC).isoformat(timespec="milliseconds")
        cached = max(0, one.tokens - one.uncached)
        lines.append(
            f"  {at}  attempt {one.attempt} on {one.worker} by {one.router or 'itself'}, {one.tokens} prompt tokens "
            f"({cached} cached by prediction), waited {one.waited_s:.3f} s" + (f", reason {one.reason}" if one.reason else "")
        )
    return "\n".join(lines) + "\n"


def _about(story: Story) -> list[str]:
    at = datetime.fromtimestamp(story.submitted, UTC).isoformat(timespec="milliseconds")
    served = f"model {story.model}" + (f", adapter {story.adapter}" if story.adapter else "")
    lines = [f"  {served}, pool {story.pool}, tenant {story.tenant}, class {story.request_class}, submitted {at}"]
    if story.name:
        lines.append(f"  the client's id is {story.name}")
    tokens = f"  {story.prompt_tokens} prompt tokens, {story.answer_tokens} of at most {story.max_tokens} answer tokens"
    lines.append(tokens + (f" in {story.choices} choices" if story.choices > 1 else ""))
    return lines


def _end(story: Story) -> str:
    if story.ended_s is None:
        return "still open"
    if story.fault:
        return f"ended as {story.fault}: {story.message}"
    return f"answered ({', '.join(story.finish) or 'nothing'})"


def _told(event: StoryEvent, story: Story) -> str:
    worker = event.worker + (f"~{event.rank}" if event.rank is not None else "")
    again = f", attempt {event.attempt}" if event.attempt > 1 else ""
    match event.kind:
        case "placed":
            if not event.by:
                return f"placed on {worker}{again} by the worker itself"
            cached = max(0, (event.tokens or story.prompt_tokens) - event.uncached)
            apart = f"; prompt computed by {'any prefill worker' if event.prefill == '*' else event.prefill}"
            return f"placed on {worker}{again} by {event.by}, {cached} prompt tokens cached by prediction" + (
                apart if event.prefill else ""
            )
        case "started":
            return f"started on {worker}{again}"
        case "prefilled":
            fetched = f", blocks fetched in {event.fetch_ms} ms" if event.fetch_ms else ""
            return f"first token on {worker}{again}, {event.uncached} prompt tokens computed{fetched}"
        case "moved":
            return f"moved on from {worker or 'its worker'}: attempt {event.attempt} is next"
        case "settled":
            return f"settled by {worker}{again}, {event.tokens} tokens made there"


def _line(after_s: float, text: str) -> str:
    return f"  +{after_s:8.3f}  {text}"


def _sums(parts: Sequence[Stage]) -> str:
    sums: dict[StageName, float] = {}
    for part in parts:
        sums[part.name] = sums.get(part.name, 0.0) + part.seconds
    return ", ".join(f"{MARKS[name]} {name} {seconds:.3f} s" for name, seconds in sums.items())


SEARCH_S = 60.0  # of the stored records, which have no index by request
BATCH = 1024


def trace_request(settings: Settings, request: str, *, as_json: bool) -> int:
    """Run `headrace trace`. Raises CommandError for a request that no part remembers and that was not recorded."""
    wanted = request_id(request)

    async def ask(connection: Connection, names: Subjects) -> tuple[list[Story], list[Decided], list[Routed]]:
        frontends = [names.judge(member.ingress) for member in await live_ingresses(connection, names)]
        routers = [member.router for member in await live_routers(connection, names)]
        told, known = await asyncio.gather(
            ask_subjects(connection, frontends, TellStories(name=wanted), Stories),
            ask_all(connection, names, routers, Explain(id=wanted), Explanation),
        )
        if silent := told.count(None):
            sys.stderr.write(f"{silent} of {len(told)} frontends did not answer: what they remember is missing\n")
        stories = [story for answer in told if answer is not None for story in answer.stories]
        decided = chronology(answer for answer in known if answer is not None and answer.known)
        records = [] if stories else await recorded_placements(connection, names, wanted)
        return sorted(stories, key=lambda story: story.submitted), decided, records

    stories, decided, records = connected(settings, ask, name="headrace trace")
    if not stories and not records:
        raise CommandError(
            f"no live frontend remembers a request {wanted!r}, and no placement of it is on record; frontends keep their last "
            "4096 requests, records of placements two days"
        )
    if as_json:
        sys.stdout.write(json.dumps(story_data(stories, decided, records), indent=1) + "\n")
    else:
        sys.stdout.write(_text(wanted, stories, decided, records))
    return EXIT_OK


async def live_ingresses(messaging: Messaging, names: Subjects) -> list[IngressMember]:
    """Return the frontends that hold a lease now, sorted by id."""
    entries = await messaging.bucket(names.bucket("members")).entries("ingress.>")
    found = []
    for entry in entries:
        with contextlib.suppress(WireError):  # one that cannot be read answers no question
            found.append(decode(IngressMember, entry.value))
    return sorted(found, key=lambda member: member.ingress)


async def recorded_placements(messaging: Messaging, names: Subjects, request: str) -> list[Routed]:
    """Search the stored records of all pools for the placements of a request. Raises RequestTimeout after `SEARCH_S`."""
    stream, subject = names.stream("ROUTE"), f"{names.prefix}.route.*"
    state = await messaging.stream_state(stream, subject=subject)
    follow = messaging.follow(stream, subject, start_seq=state.first_seq, batch=BATCH)
    found: list[Routed] = []
    try:
        async with asyncio.timeout(SEARCH_S):
            while follow.position < state.last_of_subject:
                for message in (await follow.next()).messages:
                    with contextlib.suppress(WireError):
                        record = decode(Routed, message.data)
                        if record.id == request:
                            found.append(record)
    except TimeoutError:
        raise RequestTimeout(f"{stream} could not be searched within {SEARCH_S:g} s") from None
    finally:
        await follow.close()
    return found


def _text(wanted: str, stories: list[Story], decided: list[Decided], records: list[Routed]) -> str:
    if not stories:
        return placements_text(wanted, records)
    now = time.time()
    return "\n".join(
        story_text(story, (one for one in decided if one.id == story.id), max(0.0, now - story.submitted)) for story in stories
    )


def story_data(stories: list[Story], decided: list[Decided], records: list[Routed]) -> dict[str, Any]:
    """Return a request as data: its timelines with their stages, and its stored placements."""
    now = time.time()
    rows: list[dict[str, Any]] = [
        {
            **msgspec.to_builtins(story),
            "events": [msgspec.structs.asdict(event) for event in story.events],
            "stages": [
                {"name": part.name, "begin_s": part.begin_s, "end_s": part.end_s, "worker": part.worker}
                for part in stages(story, max(0.0, now - story.submitted))
            ],
            "placements": [msgspec.to_builtins(one) for one in decided if one.id == story.id],
        }
        for story in stories
    ]
    stored = [
        {name: value for name, value in msgspec.structs.asdict(one).items() if name not in ("hashes", "prefill")}
        for one in records
    ]
    return {"stories": rows, "recorded": stored}


EXAMPLES = """examples:
  headrace trace chatcmpl-5f0c2a          the id of an answer, or of the request in the log
  headrace trace my-request-7 --json      what the client sent as x-request-id

Frontends remember their open requests and the last 4,096 that ended, routers why they placed one. Of older requests, and
after a restart of the frontend, the stored records of placements are shown (two days)."""


def add_trace(commands: Any, about: str) -> None:
    parser = commands.add_parser(
        "trace",
        help=about,
        description="Tell what happened to a request: its waits, placements and moves, its prefill and its end. Reads only.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("request", metavar="ID", help="id of the answer or request, or the client's x-request-id")
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_setting_flags(parser, "control")
    parser.set_defaults(run=_run, prog="headrace trace")


def _run(parsed: argparse.Namespace) -> int:

    return trace_request(located_settings(parsed), parsed.request, as_json=parsed.json)
