"""Records of ended requests: the summary that log line, spans and audit render, and the audit stream behind a bounded queue."""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.broker.codec import encode
from headrace.broker.ingress.timeline import RequestTimeline
from headrace.broker.jobs import Job
from headrace.broker.messages.frames import Part, Row
from headrace.broker.messages.operator import MOST_CONTENT, AuditRecord
from headrace.frontend.errors import AuditUnusable
from headrace.frontend.metrics import Level, Metrics
from headrace.frontend.ports import SubmittedAnswer
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge
from headrace.jetstream.ports import Messaging
from headrace.jetstream.provision import ensure_on_demand
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology

DIGITS = 4


class TokenCounts(Protocol):
    """The tokens of a request over all its prompts and choices (`headrace.frontend.generation.sse.UsageCounter`)."""

    completion: int
    prompt: int
    cached: int
    ended: bool


class RequestSummary:
    """The timelines of a request's jobs, and what this frontend knows besides: log line, audit and spans render it.

    It gathers references while the request runs. Its fields are made once, when it has ended and the first of them asks.
    """

    __slots__ = ("_counter", "_fields", "_jobs", "first_token_s", "level", "timelines")

    def __init__(self, jobs: Sequence[Job], counter: TokenCounts) -> None:
        self._jobs = jobs
        self._counter = counter
        self._fields: dict[str, Any] | None = None
        self.timelines: list[RequestTimeline] = []  # of its jobs, as far as they were submitted
        self.first_token_s: float | None = None  # since the request came
        self.level: Level | None = None  # by the targets; None = not judged

    @property
    def model(self) -> str:
        return self._jobs[0].card.model

    def used(self) -> tuple[int, int]:
        """Return the tokens of its prompts and answers, none of a request that was not answered."""
        counter = self._counter
        return (counter.prompt, counter.completion) if counter.completion or counter.ended else (0, 0)

    def submitted(self, answers: Sequence[SubmittedAnswer]) -> None:
        self.timelines = [answer.timeline for answer in answers if answer.timeline is not None]

    @property
    def attempts(self) -> int:
        """The attempts of the job that had the most."""
        return max((timeline.course().attempts for timeline in self.timelines), default=0)

    def fields(self) -> dict[str, Any]:
        """Return the fields; those that are not known are left out."""
        if self._fields is None:
            self._fields = self._made()
        return self._fields

    def _made(self) -> dict[str, Any]:
        jobs, counter = self._jobs, self._counter
        job = jobs[0]
        fields: dict[str, Any] = {"model": job.adapter or job.card.model, "tenant": job.tenant, "class": job.request_class}
        if len(jobs) > 1:
            fields["jobs"] = len(jobs)
        fields["prompt_tokens"] = counter.prompt
        if counter.ended:
            fields["cached_tokens"] = counter.cached
        fields["completion_tokens"] = counter.completion
        if self.first_token_s is not None:
            fields["ttft_s"] = round(self.first_token_s, DIGITS)
        queue_s: float | None = None
        attempts = 0
        workers: dict[str, None] = {}  # sets in the order of their values
        reasons: dict[str, None] = {}
        for timeline in self.timelines:
            waited_s, ran_on, tries, ends = timeline.course()
            if waited_s is not None and (queue_s is None or waited_s > queue_s):
                queue_s = waited_s
            if tries > attempts:
                attempts = tries
            workers |= dict.fromkeys(ran_on)
            reasons |= dict.fromkeys(ends)
        if queue_s is not None:
            fields["queue_s"] = round(queue_s, DIGITS)
        if workers:
            fields["workers"], fields["attempts"] = [*workers], attempts
        if reasons:
            fields["finish_reason"] = ",".join(reasons)
        return fields


REDACTED = "[redacted]"
MOST_KEPT = 4 * MOST_CONTENT  # characters that are looked through, so that what is redacted at the cut is redacted whole
MOST_WORKERS = 64


class Content:
    """The words of one request, as far as they are kept."""

    __slots__ = ("_answer", "_body", "_left", "cut")

    def __init__(self) -> None:
        self._body = b""
        self._answer: dict[int, list[str]] = {}
        self._left = MOST_KEPT
        self.cut = False

    def asked(self, body: bytes) -> None:
        self.cut = self.cut or len(body) > MOST_KEPT
        self._body = bytes(body[:MOST_KEPT])

    def answered(self, rows: Iterable[Row]) -> None:
        """Take rows of the answer, as they are sent."""
        for row in rows:
            text = "".join(one if isinstance(one, str) else "".join(map(_words, one)) for one in row.texts)
            if len(text) > self._left:
                self.cut = True
            if text and self._left > 0:
                self._answer.setdefault(row.choice, []).append(text[: self._left])
                self._left -= len(text)

    @property
    def request(self) -> str:
        return self._body.decode(errors="replace")

    @property
    def answer(self) -> str:
        """The texts of all choices, each on lines of its own."""
        return "\n".join("".join(parts) for _, parts in sorted(self._answer.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The facts of a request that has ended. `fields` are those of its log line."""

    at: float
    id: str
    route: str
    tenant: str
    status: int
    took_s: float
    key: str = ""
    client_id: str = ""
    code: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    content: Content | None = None


class AuditPolicy:
    """Makes records. `patterns`: what they match is redacted. `left_out`: fields that no record has."""

    def __init__(self, frontend: str, *, content: bool, patterns: Sequence[re.Pattern[str]] = (), left_out: Sequence[str] = ()):
        self.content = content
        self._frontend = frontend
        self._patterns = tuple(patterns)
        self._left_out = frozenset(left_out)

    def record(self, ended: Ended) -> AuditRecord:
        known = ended.fields
        text = {"client_id": ended.client_id}
        cut = False
        if self.content and ended.content is not None:
            request, answer = ended.content.request, ended.content.answer
            cut = ended.content.cut
            text |= {"request": request, "answer": answer}
        text = {name: self._redacted(value) for name, value in text.items()}
        cut = cut or any(len(text.get(name, "")) > MOST_CONTENT for name in ("request", "answer"))
        made = AuditRecord(
            at=ended.at,
            id=ended.id,
            frontend=self._frontend,
            route=ended.route,
            tenant=ended.tenant,
            key=ended.key,
            model=str(known.get("model", "")),
            request_class=str(known.get("class", "")),
            status=ended.status,
            code=ended.code,
            took_s=round(ended.took_s, 4),
            queue_s=known.get("queue_s"),
            ttft_s=known.get("ttft_s"),
            prompt_tokens=known.get("prompt_tokens", 0),
            cached_tokens=known.get("cached_tokens", 0),
            completion_tokens=known.get("completion_tokens", 0),
            workers=list(known.get("workers", ()))[:MOST_WORKERS],
            attempts=known.get("attempts", 0),
            finish_reason=str(known.get("finish_reason", "")),
            client_id=text["client_id"],
            request=text.get("request", "")[:MOST_CONTENT],
            answer=text.get("answer", "")[:MOST_CONTENT],
            cut=cut,
        )
        return msgspec.structs.replace(made, **{name: [] if name == "workers" else "" for name in self._left_out})

    def _redacted(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub(REDACTED, text)
        return text


def _words(part: Part) -> str:
    """Return the words of a part of a parsed answer; a call of a tool begins with its name on a line of its own."""
    return f"\n{part.name} {part.text}" if part.name else part.text


def read_patterns(file: str | None) -> list[re.Pattern[str]]:
    """Return the regular expressions of a file, one a line; lines that begin with # are none. Raises AuditUnusable."""
    if file is None:
        return []
    try:
        lines = Path(file).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise AuditUnusable(f"frontend.audit_redact: {file} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            found.append(re.compile(line))
        except re.error as error:
            raise AuditUnusable(f"frontend.audit_redact: line {number} of {file} is no regular expression: {error}") from None
    return found


log = structlog.get_logger()

MOST_WAITING = 4096
MOST_WAITING_WITH_CONTENT = 1024
AT_ONCE = 32
AGAIN_S = 1.0  # until a record is published again that the broker did not take
LAST_WORDS_S = 2.0  # at the end, for what waits
COMPLAIN_EVERY_S = 60.0


class AuditWriter:
    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        policy: AuditPolicy,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._policy = policy
        self._clock = clock
        self._most = MOST_WAITING_WITH_CONTENT if policy.content else MOST_WAITING
        self._waiting: deque[Ended] = deque()
        self._woken = asyncio.Event()
        self._written, self._dropped = (metrics.audit_records.labels(outcome) for outcome in ("written", "dropped"))
        self._dropped_now = 0
        self._complained_s = -COMPLAIN_EVERY_S

    @property
    def content(self) -> bool:
        """True where the words of requests and answers are wanted."""
        return self._policy.content

    def note(self, ended: Ended) -> None:
        """Keep an ended request until it is written; drop it where too many wait."""
        if len(self._waiting) >= self._most:
            self._drop("too many wait")
            return
        self._waiting.append(ended)
        self._woken.set()

    async def run(self) -> None:
        """Write until cancelled; then what waits is tried once more."""
        try:
            while True:
                await self._woken.wait()
                while self._waiting:
                    if not await self._write(self._taken()):
                        await asyncio.sleep(AGAIN_S)
                self._woken.clear()
        finally:
            try:
                async with asyncio.timeout(LAST_WORDS_S):
                    while self._waiting and await self._write(self._taken()):
                        pass
            except TimeoutError:
                pass
            for _ in self._waiting:
                self._drop("the frontend ends")

    def _taken(self) -> list[Ended]:
        return [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]

    async def _write(self, taken: list[Ended]) -> bool:
        """Write these at once. What the broker did not take waits again; returns False if there is some."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._publish(one)) for one in taken]
        left = [one for one, task in zip(taken, tasks, strict=True) if not task.result()]
        self._waiting.extendleft(reversed(left))
        return not left

    async def _publish(self, ended: Ended) -> bool:
        record = self._policy.record(ended)
        try:
            await self._messaging.publish(self._subjects.audit_record(record.tenant), encode(record), msg_id=record.id)
        except PayloadTooLarge:
            self._drop("it is too large for a message")
        except JetStreamError as error:
            self._complain("audit.not_written", error=str(error), waiting=len(self._waiting))
            return False
        else:
            self._written.inc()
        return True

    def _drop(self, why: str) -> None:
        self._dropped.inc()
        self._dropped_now += 1
        self._complain("audit.dropped", why=why)

    def _complain(self, event: str, **fields: object) -> None:
        now_s = self._clock()
        if now_s - self._complained_s >= COMPLAIN_EVERY_S:
            self._complained_s = now_s
            log.warning(event, **fields, dropped=self._dropped_now)
            self._dropped_now = 0


async def audit_writer(
    connection: Connection, topology: Topology, settings: FrontendSettings, metrics: Metrics, *, frontend: str
) -> AuditWriter | None:
    """Return the writer of a frontend, None where nothing is to be recorded. Raises AuditUnusable, TopologyError."""
    if settings.audit == "off":
        return None
    policy = AuditPolicy(
        frontend,
        content=settings.audit == "content",
        patterns=read_patterns(settings.audit_redact),
        left_out=settings.audit_leave_out,
    )
    await ensure_on_demand(connection, topology.audit())
    return AuditWriter(connection, topology.subjects, policy, metrics)


class Notes(Protocol):
    @property
    def content(self) -> bool: ...

    def note(self, ended: Ended) -> None:
        """Keep one request. Must not wait and must not raise."""


def audited(app: ASGIApp, notes: Notes, route: str) -> ASGIApp:
    """Return an application that notes every request of one route when it has ended."""

    async def noted(scope: Scope, receive: Receive, send: Send) -> None:
        at, began = time.time(), time.perf_counter()
        content: Content | None = None
        if notes.content:
            content = scope["headrace.content"] = Content()
        try:
            await app(scope, receive, send)
        finally:
            caller = scope.get("headrace.caller")
            summary: RequestSummary | None = scope.get("headrace.summary")
            notes.note(
                Ended(
                    at=at,
                    id=scope.get("headrace.request_id", ""),
                    route=route,
                    tenant=scope.get("headrace.tenant", "_"),
                    status=scope.get("headrace.status", 0),
                    took_s=time.perf_counter() - began,
                    key=caller.key if caller is not None else "",
                    client_id=scope.get("headrace.client_request_id") or "",
                    code=scope.get("headrace.outcome") or "",
                    fields=summary.fields() if summary is not None else {},
                    content=content,
                )
            )

    return noted
