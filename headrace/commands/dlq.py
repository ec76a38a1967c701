"""The command `headrace dlq`: lists, shows, retries and drops dead letters, with the server's advisories about our queues.

A dead letter is named by its number, which is its place in the stream, or by the id of its request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from headrace.base.errors import EXIT_OK, CommandError, StartFailed
from headrace.broker.codec import decode, unpack_f32, unpack_u32
from headrace.broker.errors import AdmissionError, BrokerError, JobError, PoisonJob, UnknownModel, WireError
from headrace.broker.ingress.ingress import Ingress
from headrace.broker.ingress.stream import JobStream
from headrace.broker.jobs import NOTHING, Job, new_id, plain
from headrace.broker.messages.durable import DeadLetter, Unreadable
from headrace.broker.messages.requests import Envelope, Generation, Pooling
from headrace.broker.models.cards import ModelCard
from headrace.broker.settings import IngressSettings
from headrace.broker.spill import unseal
from headrace.commands.control import announce, columns, connected, located_settings, request_id
from headrace.commands.groups import add_group
from headrace.config.build_settings import add_setting_flags
from headrace.config.settings import Settings
from headrace.jetstream.errors import ObjectNotFound
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


# Runs `headrace dlq retry`: a dead letter's request runs once more, as a new request, and its answer is printed.
#
# The first client has been told that the request failed, and its judge has closed it. So this command is an ingress of its
# own for one request: it holds a lease, judges the run, prints the answer, and drops the letter once the run has ended well.

_START_TIMEOUT_S = 10.0
_DEADLINE_MARGIN_S = 10.0
_NEW_LETTER_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _Choice:
    text: str = ""
    tokens: int = 0
    finish: str = ""
    vector: list[float] | None = None


class _Answer:
    """The answer received so far. A single choice is printed as it arrives."""

    def __init__(self, choices: int, *, live: bool) -> None:
        self.choices = [_Choice() for _ in range(choices)]
        self._live = live and choices == 1

    async def read(self, stream: JobStream) -> None:
        while rows := await stream.rows():
            for row in rows:
                choice = self.choices[row.choice]
                text = plain(row.texts)
                choice.tokens += len(row.ids)
                if row.fin is not None:
                    text += plain([row.fin.tail])
                    choice.finish = row.fin.reason
                    if row.fin.vector:
                        choice.vector = unpack_f32(row.fin.vector)
                        text += json.dumps(choice.vector)
                choice.text += text
                if self._live:
                    sys.stdout.write(text)
                    sys.stdout.flush()

    def break_off(self) -> None:
        """End the current line, so that the next output begins a line."""
        if self._live and self.choices[0].text:
            sys.stdout.write("\n")
            sys.stdout.flush()

    def show(self) -> None:
        if self._live:
            self.break_off()
            return
        for number, choice in enumerate(self.choices):
            sys.stdout.write(f"--- choice {number}, {choice.finish}\n{choice.text}\n")

    def as_data(self) -> list[dict[str, Any]]:
        if any(c.vector is not None for c in self.choices):
            return [{"vector": c.vector, "finish_reason": c.finish} for c in self.choices]
        return [{"text": c.text, "tokens": c.tokens, "finish_reason": c.finish} for c in self.choices]


def retry_letter(settings: Settings, wanted: str, *, keep: bool, deadline_s: float | None, as_json: bool) -> int:
    """Run `headrace dlq retry`. Raises CommandError when the request cannot be run or fails again; the letter then stays."""
    if deadline_s is not None and not 0 < deadline_s < float("inf"):
        raise CommandError(f"--deadline must be above 0 seconds, got {deadline_s:g}")

    async def retry(messaging: Messaging, names: Subjects) -> None:
        letter = await find_letter(messaging, names, wanted)
        if letter.request is None:
            raise CommandError(f"{letter.seq} is {letter.reason}, no request: there is nothing to run")
        envelope = letter.request.envelope
        work = await _work(messaging, names, envelope)
        answer = _Answer(envelope.choices, live=not as_json)
        try:
            job_id = await _run(messaging, names, envelope, work, answer, deadline_s=deadline_s)
        except BaseException:
            answer.break_off()
            raise
        dropped = not keep and await messaging.delete_message(names.stream("DLQ"), letter.seq)
        announce(messaging, names, "dlq retry", letter=letter.seq, request=envelope.id, retried_as=job_id, dropped=dropped)
        if as_json:
            told = {"number": letter.seq, "request": envelope.id, "retried_as": job_id, "choices": answer.as_data()}
            sys.stdout.write(json.dumps({**told, "dropped": dropped}, indent=1) + "\n")
        else:
            answer.show()
            sys.stderr.write(f"answered as {job_id}; dead letter {letter.seq} {'dropped' if dropped else 'kept'}\n")

    connected(settings, retry, name="headrace dlq retry")
    return EXIT_OK


async def run_again(messaging: Messaging, names: Subjects, envelope: Envelope) -> str:
    """Run a request once more to its end, without printing its answer, and return the id under which it ran.

    Raises CommandError when it cannot be run or fails again.
    """
    work = await _work(messaging, names, envelope)
    return await _run(messaging, names, envelope, work, _Answer(envelope.choices, live=False), deadline_s=None)


async def _work(messaging: Messaging, names: Subjects, envelope: Envelope) -> Generation | Pooling:
    """Return the request's prompt and options. Raises CommandError when they are gone or cannot be decoded."""
    payload = envelope.payload
    if envelope.spill is not None:
        try:
            stored = await messaging.objects(names.bucket("spill")).get(envelope.spill.object)
            payload = await unseal(envelope.spill, stored)
        except ObjectNotFound:
            raise CommandError(f"the prompt of {envelope.id} was too large for a message and its copy is gone") from None
        except BrokerError as error:
            raise CommandError(str(error)) from None
    try:
        return decode(Pooling, payload) if envelope.kind == "pool" else decode(Generation, payload)
    except WireError as error:
        raise CommandError(f"the prompt of {envelope.id} cannot be read: {error}") from error


async def _run(
    messaging: Messaging,
    names: Subjects,
    envelope: Envelope,
    work: Generation | Pooling,
    answer: _Answer,
    *,
    deadline_s: float | None,
) -> str:
    """Submit the request, read its answer to the end, and give up the lease. Returns the id under which it ran."""
    ingress = Ingress(messaging, names, settings=IngressSettings(no_worker_wait_s=0.0))
    running = asyncio.create_task(ingress.run(), name="ingress")
    try:
        try:
            await ingress.wait_started(_START_TIMEOUT_S)
        except TimeoutError:
            raise StartFailed(
                f"no lease and no list of models within {_START_TIMEOUT_S:g} s: is the NATS server well?"
            ) from None
        job = _job(envelope, work, _card(ingress, envelope), deadline_s=deadline_s)
        try:
            async with asyncio.timeout(job.deadline_s + _DEADLINE_MARGIN_S):  # the ingress itself ends it at its deadline
                await answer.read(await ingress.submit(job))
        except TimeoutError:
            raise StartFailed(f"{job.id} has not ended at its deadline: is the NATS server well?") from None
        except AdmissionError as error:
            raise CommandError(f"{envelope.id} was not accepted: {error}") from error
        except JobError as error:
            if isinstance(error, PoisonJob):
                await _letter_of(messaging, names, job.id)
            raise CommandError(f"{envelope.id} failed again, as {job.id}: {error}") from error
        return job.id
    finally:
        # What is still open is cancelled everywhere, and its worker is free.
        await asyncio.shield(ingress.drain(0.0))
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def _card(ingress: Ingress, envelope: Envelope) -> ModelCard:
    try:
        card = ingress.models.get(envelope.model).card
    except UnknownModel as error:
        raise CommandError(str(error)) from error
    if card.pool != envelope.pool:
        raise CommandError(f"model {envelope.model!r} is served in pool {card.pool} here; the request was of {envelope.pool}")
    return card


def _job(envelope: Envelope, work: Generation | Pooling, card: ModelCard, *, deadline_s: float | None) -> Job:
    """Return the request under a new id, so that late messages of the old run cannot reach it.

    A demand for exactly one worker is dropped: that worker is one of those that crashed.
    """
    pooling = work if isinstance(work, Pooling) else None
    generation = work if isinstance(work, Generation) else NOTHING
    return Job(
        id=new_id(),
        card=card,
        generation=generation,
        pooling=pooling,
        prompt_tokens=envelope.tokens or len(unpack_u32(generation.token_ids)),
        max_tokens=envelope.max_tokens,
        hashes=envelope.hashes if envelope.block_size == card.block_size else b"",
        choices=envelope.choices,
        request_class="hi" if envelope.request_class == "hi" else "std",
        tenant=envelope.tenant,
        priority=envelope.priority,
        deadline_s=deadline_s or max(1.0, envelope.deadline - envelope.created),
        adapter=envelope.adapter,
        session=envelope.session,
        affinity=envelope.affinity,
        require=envelope.require,
        prefer=envelope.prefer,
    )


async def _letter_of(messaging: Messaging, names: Subjects, request: str) -> None:
    """Wait until the second failure is dead-lettered, too: the ingress writes that letter while it reports the error."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_NEW_LETTER_TIMEOUT_S):
            while not any(letter.id == request for letter in await letters(messaging, names)):
                await asyncio.sleep(0.05)


EXAMPLES = """examples:
  headrace dlq ls --nats nats://broker:4222
  headrace dlq show 17
  headrace dlq retry 17 --keep                    once more, as a new request; the answer is printed here
  headrace dlq drop 17 18
  headrace dlq drop --older-than 604800

A letter is named by its number or by the id of its request. A request that crashed its workers may crash as many more when it
is run again."""


def add_dlq(commands: Any, about: str) -> None:
    actions = add_group(
        commands,
        "dlq",
        about=about,
        description="Dead letters: requests that were taken out of service, and what the server took out of our queues.",
        examples=EXAMPLES,
    )
    _add(actions, "ls", _run_ls, "list all dead letters, oldest first")
    show = _add(actions, "show", _run_show, "show one dead letter, its history and why it is here")
    retry = _add(actions, "retry", _run_retry, "run the request of a dead letter once more and print its answer")
    drop = _add(actions, "drop", _run_drop, "remove dead letters for good")
    for parser in (show, retry):
        parser.add_argument("letter", metavar="LETTER", help="its number, or the id of its request")
    retry.add_argument("--keep", action="store_true", help="keep the dead letter even if its request is answered")
    retry.add_argument(
        "--deadline",
        type=float,
        metavar="SECONDS",
        help="how long it may take (default: as long as the request could at first)",
    )
    drop.add_argument("letters", metavar="LETTER", nargs="*", help="its number, or the id of its request")
    drop.add_argument("--all", action="store_true", dest="everything", help="all of them")
    drop.add_argument("--older-than", type=float, metavar="SECONDS", help="those that are here for longer")


def _add(actions: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_setting_flags(parser, "control")
    parser.set_defaults(run=run, prog=f"headrace dlq {name}")
    return parser


def _run_ls(parsed: argparse.Namespace) -> int:

    return list_letters(located_settings(parsed), as_json=parsed.json)


def _run_show(parsed: argparse.Namespace) -> int:

    return show_letter(located_settings(parsed), parsed.letter, as_json=parsed.json)


def _run_retry(parsed: argparse.Namespace) -> int:

    settings = located_settings(parsed)
    return retry_letter(settings, parsed.letter, keep=parsed.keep, deadline_s=parsed.deadline, as_json=parsed.json)


def _run_drop(parsed: argparse.Namespace) -> int:

    return drop_letters(
        located_settings(parsed),
        parsed.letters,
        everything=parsed.everything,
        older_than_s=parsed.older_than,
        as_json=parsed.json,
    )
