"""Runs `headrace trace`: the story of a request, from the frontends, the routers and the stored records of placements."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from typing import Any

import msgspec

from headrace.base.errors import EXIT_OK, CommandError
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages import Decided, Explain, Explanation, IngressMember, Routed, Stories, Story, TellStories
from headrace.commands.explain import chronology, live_routers
from headrace.commands.operating.control_client import ask_all, ask_subjects, connected, request_id
from headrace.commands.story_text import placements_text, stages, story_text
from headrace.config.settings import Settings
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import RequestTimeout
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

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
    """Return what is known of a request as data: its stories with their stages, and the stored records of its placements."""
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
