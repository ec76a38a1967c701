"""Runs `headrace dlq retry`: a dead letter's request runs once more, as a new request, and its answer is printed.

The first client has been told that the request failed, and its judge has closed it.  So this command is an ingress of its own
for one request: it holds a lease, judges the run, prints the answer, and drops the letter once the run has ended well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import EXIT_OK, CommandError, StartFailed
from headrace.broker.codec import decode, unpack_f32, unpack_u32
from headrace.broker.errors import AdmissionError, BrokerError, JobError, PoisonJob, UnknownModel, WireError
from headrace.broker.ingress.ingress import Ingress
from headrace.broker.ingress.stream import JobStream
from headrace.broker.jobs import NOTHING, Job, new_id
from headrace.broker.messages import Envelope, Generation, Pooling
from headrace.broker.models.cards import ModelCard
from headrace.broker.output_parts import plain
from headrace.broker.sealing import unseal
from headrace.broker.settings import IngressSettings
from headrace.commands.dlq import find_letter, letters
from headrace.commands.operating.audit import announce
from headrace.commands.operating.control_client import connected
from headrace.config.settings import Settings
from headrace.jetstream.errors import ObjectNotFound
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

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
        """Print the choices that were not printed as they arrived."""
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
