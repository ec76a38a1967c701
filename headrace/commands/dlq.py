"""Runs `headrace dlq ls`, `show` and `drop`: dead-lettered requests, and the server's advisories about our queues.

A dead letter is named by its number, which is its place in the stream, or by the id of its request.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from headrace.base.errors import EXIT_OK, CommandError
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages import DeadLetter, Unreadable
from headrace.commands.operating.audit import announce
from headrace.commands.operating.control_client import columns, connected, request_id
from headrace.config.settings import Settings
from headrace.jetstream.ports import Messaging, StoredMessage
from headrace.jetstream.provision import parse_time
from headrace.jetstream.subjects import Subjects

_MOST = 10_000  # letters read at once
_ADVISORIES = {
    "max_deliver": "the server gave up delivering it",
}


class Advisory(msgspec.Struct, frozen=True):
    """The server's advisory that it stopped delivering a message of one of our queues."""

    type: str
    stream: str
    consumer: str
    stream_seq: int
    timestamp: str = ""
    deliveries: int = 0
    reason: str = ""

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Letter:
    """A message of the stream DLQ: a request, an undecodable message of a queue, or an advisory of the server.

    A letter that cannot itself be decoded has none of the three. `trouble` says what could not be decoded.
    """

    seq: int
    subject: str
    request: DeadLetter | None = None
    advisory: Advisory | None = None
    unreadable: Unreadable | None = None
    trouble: str = ""

    @property
    def id(self) -> str:
        """Return the id of the request, empty when it is not known."""
        return self.request.envelope.id if self.request else ""

    @property
    def at(self) -> float:
        """Return the Unix time of the letter, 0 when it is not known."""
        if self.request:
            return self.request.at
        if self.unreadable:
            return self.unreadable.at
        return parse_time(self.advisory.timestamp).timestamp() if self.advisory and self.advisory.timestamp else 0.0

    @property
    def reason(self) -> str:
        """Return the reason in one word."""
        if self.request:
            return self.request.reason
        return self.advisory.kind if self.advisory else "unreadable"


def read_letter(message: StoredMessage, names: Subjects) -> Letter:
    """Decode one message of the stream. Never raises: a letter that cannot be decoded can still be shown and dropped."""
    try:
        if message.subject.startswith(f"{names.prefix}.dlq."):
            return _of_ours(message)
        advisory = msgspec.json.decode(message.data, type=Advisory)
        if advisory.timestamp:
            parse_time(advisory.timestamp)
        return Letter(message.seq, message.subject, advisory=advisory)
    except (WireError, msgspec.DecodeError, ValueError) as error:
        return Letter(message.seq, message.subject, trouble=str(error))


def _of_ours(message: StoredMessage) -> Letter:
    """Decode a letter that Headrace itself wrote. Raises WireError."""
    try:
        return Letter(message.seq, message.subject, request=decode(DeadLetter, message.data))
    except WireError:
        try:
            unreadable = decode(Unreadable, message.data)
        except WireError:
            unreadable = None
        if unreadable is None:
            raise
    trouble = f"{unreadable.why}; {len(unreadable.data)} bytes of {unreadable.subject}"
    return Letter(message.seq, message.subject, unreadable=unreadable, trouble=trouble)


async def letters(messaging: Messaging, names: Subjects) -> list[Letter]:
    """Return all letters, oldest first."""
    found = await messaging.subject_messages(names.stream("DLQ"), ">", limit=_MOST)
    return [read_letter(message, names) for message in found]


async def find_letter(messaging: Messaging, names: Subjects, wanted: str) -> Letter:
    """Return the letter with this number, or the newest letter of this request. Raises CommandError."""
    if wanted.isdecimal():
        message = await messaging.get_message(names.stream("DLQ"), int(wanted)) if int(wanted) else None
        if message is not None:
            return read_letter(message, names)
    wanted = request_id(wanted)
    for letter in reversed(await letters(messaging, names)):
        if letter.id == wanted:
            return letter
    raise CommandError(f"there is no dead letter {wanted!r}: name its number or the id of its request, as in headrace dlq ls")


def list_letters(settings: Settings, *, as_json: bool) -> int:
    """Run `headrace dlq ls`."""
    found = connected(settings, letters, name="headrace dlq")
    if as_json:
        sys.stdout.write(json.dumps([summary(letter) for letter in found], indent=1) + "\n")
        return EXIT_OK
    head = ["number", "since", "reason", "request", "model", "attempt", "crashed on"]
    rows = [head, *map(_row, found)]
    sys.stdout.write(columns(rows) if found else "there are no dead letters\n")
    if len(found) == _MOST:
        sys.stderr.write(f"only the oldest {_MOST} were read\n")
    return EXIT_OK


def show_letter(settings: Settings, wanted: str, *, as_json: bool) -> int:
    """Run `headrace dlq show`. Raises CommandError when there is no such letter."""

    async def ask(messaging: Messaging, names: Subjects) -> Letter:
        return await find_letter(messaging, names, wanted)

    letter = connected(settings, ask, name="headrace dlq")
    sys.stdout.write(json.dumps(details(letter), indent=1) + "\n" if as_json else told(letter))
    return EXIT_OK


def drop_letters(
    settings: Settings, wanted: Sequence[str], *, everything: bool, older_than_s: float | None, as_json: bool
) -> int:
    """Run `headrace dlq drop`.

    Raises CommandError when it is not clear which letters are meant, or when one does not exist; then none is dropped.
    """
    if sum((bool(wanted), everything, older_than_s is not None)) != 1:
        raise CommandError("say which: numbers or request ids, --all, or --older-than SECONDS")
    if older_than_s is not None and not 0 <= older_than_s < float("inf"):
        raise CommandError(f"--older-than must be 0 or more seconds, got {older_than_s:g}")

    async def drop(messaging: Messaging, names: Subjects) -> list[int]:
        if wanted:
            chosen = [await find_letter(messaging, names, one) for one in wanted]
        else:
            before = time.time() - older_than_s if older_than_s is not None else float("inf")
            # One of unknown age is not older than anything: only --all takes it.
            chosen = [letter for letter in await letters(messaging, names) if everything or 0 < letter.at < before]
        numbers = dict.fromkeys(letter.seq for letter in chosen)
        gone = [seq for seq in numbers if await messaging.delete_message(names.stream("DLQ"), seq)]
        announce(messaging, names, "dlq drop", letters=gone)
        return gone

    dropped = connected(settings, drop, name="headrace dlq")
    if as_json:
        sys.stdout.write(json.dumps({"dropped": dropped}) + "\n")
    else:
        sys.stdout.write(f"{len(dropped)} dead letter{'' if len(dropped) == 1 else 's'} dropped\n")
    return EXIT_OK


def _row(letter: Letter) -> list[str]:
    known = summary(letter)
    crashed = ", ".join(entry["worker"] for entry in known.get("history", ()))
    where = known.get("model") or known.get("stream") or letter.subject
    attempt = str(known.get("attempt", "-"))
    return [str(letter.seq), _when(letter.at), letter.reason, letter.id or "-", where, attempt, crashed]


def summary(letter: Letter) -> dict[str, Any]:
    """Return the data of a letter's line in the list."""
    told: dict[str, Any] = {"number": letter.seq, "at": letter.at, "reason": letter.reason, "subject": letter.subject}
    if letter.request is not None:
        envelope = letter.request.envelope
        told |= {
            "request": envelope.id,
            "pool": envelope.pool,
            "model": envelope.model,
            "tenant": envelope.tenant,
            "attempt": letter.request.attempt,
            "history": [
                {"attempt": entry.attempt, "worker": entry.worker, "group": entry.group} for entry in letter.request.history
            ],
        }
    if letter.advisory is not None:
        told |= {name: getattr(letter.advisory, name) for name in ("stream", "consumer", "stream_seq", "deliveries")}
        told["said"] = letter.advisory.reason
    if letter.trouble:
        told["trouble"] = letter.trouble
    return told


def details(letter: Letter) -> dict[str, Any]:
    """Return all that is known of a letter, except the prompt itself."""
    found = summary(letter)
    if letter.request is not None:
        envelope = letter.request.envelope
        found["envelope"] = {
            "judge": envelope.judge,
            "created": envelope.created,
            "deadline": envelope.deadline,
            "prompt_tokens": envelope.tokens,
            "max_tokens": envelope.max_tokens,
            "choices": envelope.choices,
            "class": envelope.request_class,
            "priority": envelope.priority,
            "adapter": envelope.adapter,
            "session": envelope.session,
            "payload_bytes": envelope.spill.size if envelope.spill else len(envelope.payload),
            "spilled": envelope.spill is not None,
        }
    return found


def told(letter: Letter) -> str:
    """Return a dead letter as text: the request, how it ended, and the commands to retry or drop it."""
    if letter.request is None:
        return _told_of_the_rest(letter)
    envelope = letter.request.envelope
    limit = f"at most {envelope.max_tokens}" if envelope.max_tokens else "any number of"
    given_up = f"given up {_when(letter.at)} in attempt {letter.request.attempt}"
    lines = [
        f"{letter.seq}: request {envelope.id}, {letter.reason}",
        f"  model {envelope.model}, pool {envelope.pool}, tenant {envelope.tenant}, class {envelope.request_class}",
        f"  {envelope.tokens} prompt tokens, {limit} tokens for each of {envelope.choices} choices",
        f"  accepted {_when(envelope.created)} by {envelope.judge}, {given_up}",
    ]
    if letter.request.history:
        lines.append("  it was running when these workers crashed, one of so many jobs:")
        lines += [
            f"    attempt {entry.attempt}  {entry.worker}  {entry.group or 'unknown'}" for entry in letter.request.history
        ]
    lines += [
        f"  to run it once more and see the answer: headrace dlq retry {letter.seq}",
        f"  to forget it: headrace dlq drop {letter.seq}",
    ]
    return "\n".join(lines) + "\n"


def _told_of_the_rest(letter: Letter) -> str:
    advisory = letter.advisory
    if advisory is None:
        return f"{letter.seq}: cannot be read ({letter.trouble}), on {letter.subject}\n"
    why = _ADVISORIES.get(advisory.kind, advisory.kind) + (f": {advisory.reason}" if advisory.reason else "")
    return (
        f"{letter.seq}: advisory of the server, {_when(letter.at)}\n"
        f"  message {advisory.stream_seq} of {advisory.stream}, consumer {advisory.consumer}, "
        f"after {advisory.deliveries} deliveries\n"
        f"  {why}\n"
    )


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z") if at else "unknown"
