"""Decides what the audit stream keeps of a request: its figures, its content where that is wanted, and what is redacted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headrace.broker.messages import Part, Row
from headrace.broker.messages.audit_records import MOST_CONTENT, AuditRecord
from headrace.frontend.errors import AuditUnusable

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
        """Take the body of the request."""
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
        """Return the record of a request."""
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
