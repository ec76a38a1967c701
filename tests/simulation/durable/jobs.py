"""What simulated publishers ask of stored jobs, a renderer that makes requests of them, and what must come out.

A token names its run, its choice and its position, as in `protocol_requests`.  The answer to a job is the list of its tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.broker.durable.names import JobRef, job_id, job_of_run, job_token
from headrace.broker.durable.stored_job import StoredJob
from headrace.broker.jobs import Job
from headrace.broker.messages.durable import JobResult, ResultResponse, ResultTokens
from headrace.broker.messages.frames import JobFault, Row
from headrace.broker.messages.requests import Generation
from headrace.jetstream.subjects import slug
from tests.simulation.protocol.requests import CARD, RunNote, Wish, tag_of, token
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.world import Violation

SLUG = slug("m")
TENANT = "t"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWish:
    """A kind of stored job. `parts`: lengths of the choices of each of its requests. `poison`: a "worker" or the "carrier"."""

    at_s: float = 0.0
    parts: tuple[tuple[int, ...], ...] = ((8,),)
    durable: bool = False
    poison: str = ""
    deadline_s: float = 400.0
    cancel_s: float | None = None  # a canceller comes so long after the publish
    twice_s: float | None = None  # it is published once more so long after
    malformed: bool = False
    slug: str = SLUG  # of its model; another one is not known
    batch: str = ""
    request_class: str = "batch"

    @property
    def lengths(self) -> list[int]:
        return [length for part in self.parts for length in part]

    def part(self, number: int) -> Wish:
        """One of its requests, as an engine sees it."""
        return Wish(lengths=self.parts[number], poison=self.poison if self.poison == "worker" else "")


@dataclass(eq=False, slots=True)
class Asked:
    """A job that was published: what has come of it."""

    name: str
    wish: JobWish
    published_s: float = 0.0
    stored: bool = False
    told: str = ""  # what its canceller was told
    events: list[bytes] = field(default_factory=list)  # what the reader of its stream got
    read_to_end: str = ""

    @property
    def id(self) -> str:
        return job_id(TENANT, self.name)

    @property
    def token(self) -> str:
        return job_token(self.name)

    def body(self) -> bytes:
        return b"[1]" if self.wish.malformed else json.dumps({"name": self.name}).encode()


def check_tokens(asked: Asked, tokens: list[list[int]], runs: Mapping[int, RunNote], *, whole: bool) -> None:
    """Every token is of a run of this job, in its place, and its run went on from exactly those before. Raises Violation."""
    wish = asked.wish
    if whole and [len(ids) for ids in tokens] != wish.lengths:
        raise Violation(f"wrong answer of {asked.name}: {[len(ids) for ids in tokens]} tokens")
    firsts: list[tuple[int, int]] = []  # of each choice its request and its number there
    for number, part in enumerate(wish.parts):
        firsts += [(number, choice) for choice in range(len(part))]
    requests: dict[int, set[str]] = {}
    for choice, ids in enumerate(tokens):
        number, inner = firsts[choice]
        for position, token_id in enumerate(ids):
            note = runs[tag_of(token_id)]
            requests.setdefault(number, set()).add(note.request_id)
            if job_of_run(note.request_id) != asked.id or token_id != token(note.tag, inner, position):
                raise Violation(f"wrong token of {asked.name} at {choice}.{position}: {token_id:x}")
            changed = position == 0 or tag_of(ids[position - 1]) != note.tag
            if changed and tuple(ids[:position]) != note.prefix[inner]:
                raise Violation(f"wrong run of {asked.name} at {choice}.{position}: it began after {len(note.prefix[inner])}")
    if not wish.durable and any(len(ids) > 1 for ids in requests.values()):
        raise Violation(f"mixed submissions of {asked.name}: {requests}")


class SimRendered:
    """Implements `RenderedJob`. Each row makes one event; the last event is `end`, or the fault."""

    def __init__(self, asked: Asked, run: str, deadline_s: float) -> None:
        wish = asked.wish
        self.wish = wish
        self.tokens_of: list[list[int]] = [[] for _ in wish.lengths]
        self.finished: set[int] = set()
        self.fault: JobFault | None = None
        self.requests = [
            Job(
                id=run if not number else f"{run}-{number}",
                card=CARD,
                generation=Generation(token_ids=b"\1\0\0\0"),
                prompt_tokens=1,
                max_tokens=max(part),
                choices=len(part),
                deadline_s=deadline_s,
                request_class="batch" if wish.request_class == "batch" else "std",
            )
            for number, part in enumerate(wish.parts)
        ]

    @property
    def open(self) -> bool:
        return len(self.finished) < len(self.wish.lengths)

    def take(self, rows: list[Row]) -> list[bytes]:
        for row in rows:
            have = self.tokens_of[row.choice]
            if row.offset != len(have) or row.choice in self.finished:
                raise Violation(f"wrong offset: {row.offset} after {len(have)} tokens of choice {row.choice}")
            have += row.ids
            if row.fin is not None:
                self.finished.add(row.choice)
        if not self.wish.durable:
            return []
        return [msgspec.json.encode([row.choice, row.offset, row.ids]) for row in rows]

    async def finish(self) -> list[bytes]:
        await asyncio.sleep(0.01)
        return [b'"end"'] if self.wish.durable else []

    def fail(self, fault: JobFault) -> list[bytes]:
        self.fault = fault
        return [msgspec.json.encode(fault.code)] if self.wish.durable else []

    def response(self) -> ResultResponse:
        body = msgspec.json.encode({"tokens": self.tokens_of, "fault": self.fault.code if self.fault else ""})
        return ResultResponse(status_code=500 if self.fault else 200, request_id="r", body=msgspec.Raw(body))

    def settled(self) -> None:
        """Count nothing."""

    @property
    def tokens(self) -> ResultTokens:
        return ResultTokens(completion=sum(len(ids) for ids in self.tokens_of))


class SimRenderer:
    """Implements `JobRenderer` for the jobs of one deployment. Poison of carriers ends the process."""

    def __init__(self, machine: Machine, jobs: Mapping[str, Asked], on_poison: Callable[[str], None]) -> None:
        self._machine = machine
        self._jobs = jobs
        self._on_poison = on_poison

    def serves(self, model_slug: str) -> bool:
        return model_slug == SLUG

    async def render(self, job: StoredJob, run: str) -> SimRendered:
        asked = self._jobs[job.name]
        await asyncio.sleep(0.01)
        if asked.wish.poison == "carrier":
            self._on_poison(job.name)
            self._machine.crash()
            await asyncio.sleep(1000.0)
        return SimRendered(asked, run, job.deadline - self._machine.wall())


class SimBatches:
    """Implements `CarriedBatches`: batches are closed at set times."""

    def __init__(self, machine: Machine, closing: tuple[tuple[str, float, str], ...]) -> None:
        self._machine = machine
        self._closing = {batch: (at_s, how) for batch, at_s, how in closing}

    def closing(self, batch_id: str) -> Any:
        at_s, how = self._closing.get(batch_id, (1e9, ""))
        return how if self._machine.world.now >= at_s else None

    def see(self, job: JobRef, result: JobResult) -> None:
        return None
