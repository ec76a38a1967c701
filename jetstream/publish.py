"""Requests and stream publishes of a connection: matches each call with its answer, and repeats it where that is safe."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from itertools import count
from typing import Generic, TypeVar

import msgspec
import structlog

from headrace.jetstream import api, metrics, wire
from headrace.jetstream.errors import (
    AccessDenied,
    JetStreamError,
    NoLeader,
    NoResponder,
    NotConnected,
    PayloadTooLarge,
    PublishUnknown,
    RequestTimeout,
    TopologyError,
)
from headrace.jetstream.ports import PubAck
from headrace.jetstream.raw_client import CoreClient

T = TypeVar("T")


class AckGroup(Generic[T]):
    """Answers that are awaited together, without a future, a timer and a wake-up for each.

    Hand out all parts before the first answer.
    """

    def __init__(self) -> None:
        self._open = 0
        self._all: asyncio.Future[None] | None = None

    def part(self) -> AckPart[T]:
        self._open += 1
        return AckPart(self)

    async def all(self) -> None:
        """Wait until every part has its outcome."""
        if self._open:
            self._all = asyncio.get_running_loop().create_future()
            await self._all

    def answered(self) -> None:
        self._open -= 1
        if not self._open and self._all is not None and not self._all.done():
            self._all.set_result(None)


class AckPart(Generic[T]):
    """The slot of one answer, filled like a future, but without waking a task by itself."""

    __slots__ = ("_group", "outcome")

    def __init__(self, group: AckGroup[T]) -> None:
        self._group = group
        self.outcome: T | BaseException | None = None

    def done(self) -> bool:
        return self.outcome is not None

    def set_result(self, answer: T) -> None:
        self.outcome = answer
        self._group.answered()

    def set_exception(self, error: BaseException) -> None:
        self.outcome = error
        self._group.answered()


AGAIN_S = 0.4  # without an answer; a server that is well answers within some hundredths of a second


class ServerReply(msgspec.Struct, frozen=True):
    """An answer: payload, inline status (0 = none) and the raw header block."""

    data: bytes
    status: int = 0
    headers: bytes | None = None


class Call:
    """A call that waits for an answer. `future` is replaced for every try of a publish."""

    __slots__ = (
        "_again_at",
        "asked_at",
        "cmd",
        "deadline",
        "future",
        "repeatable",
        "repeated",
        "sent_again",
        "subject",
        "timed_out",
        "timer",
    )

    def __init__(self, subject: str, cmd: bytes, *, repeatable: bool | None) -> None:
        self.subject = subject
        self.cmd = cmd
        self.repeatable = repeatable  # None: a request, which is given up when the connection breaks
        self.repeated = bool(repeatable)  # may be sent more than once on one connection
        self.sent_again = False
        self.future: asyncio.Future[ServerReply] | AckPart[ServerReply] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.deadline = self.asked_at = 0.0  # loop time; not noted of a request that is answered by a client
        self.timed_out = False
        self._again_at = 0.0

    def is_due_again(self, now: float) -> bool:
        """Return True if the call has been unanswered long enough to be sent again, once per period.

        The first look at a call only starts the period, so that an answered call costs nothing.
        """
        if not self.repeated or self.future is None or self.future.done() or now < self._again_at:
            return False
        due = self._again_at > 0.0
        self._again_at = now + AGAIN_S
        return due

    def fail(self, error: JetStreamError) -> None:
        if self.future is not None and not self.future.done():
            self.future.set_exception(error)

    def expire(self) -> None:
        self.timed_out = True
        self.fail(RequestTimeout(f"no answer on {self.subject} in time"))


# Answers of the server arrive at `<inbox>.a.<number>` and are matched to a future by that number. A call costs a future and a
# timer, but no task and no `wait_for`. A publish keeps its number and its bytes over all its tries.
#
# A process that is asked sees where its answer goes, and may publish there. So such questions show a separate inbox with 64
# random bits each: the recipient cannot guess the subject of any other answer.

log = structlog.get_logger(__name__)

RETRY_FIRST_S = 0.02
RETRY_MAX_S = 0.25

_SHOWN = b"q"  # begins the numbers of calls that another process sees; those of the others are digits


class _PubReply(msgspec.Struct, frozen=True):
    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    val: str | None = None
    error: api.ApiFault | None = None


_pub_reply = msgspec.json.Decoder(_PubReply)


class _Disconnected(JetStreamError):
    """The connection broke while a publish waited for its ack."""


class Mux:
    """Multiplexes the calls of one connection that expect one answer each."""

    def __init__(self, core: CoreClient, inbox: str, *, shown: str = "", api_prefix: str = api.API) -> None:
        """`shown`: the inbox that other processes see, which reveals nothing of `inbox`."""
        self._core = core
        self._api_prefix = api_prefix
        self._loop = asyncio.get_running_loop()
        # A token of its own: the server would deliver what arrives at `<inbox>.<reader>` a second time to `<inbox>.*`.
        self._prefix = f"{inbox}.a."
        self._skip = len(self._prefix)
        self._calls: dict[bytes, Call] = {}
        self._numbers = count(1)
        self._denied: str | None = None
        self._unstored_since = self._last_unstored = 0.0  # loop times of failed publishes since the last that was stored
        self._up = asyncio.Event()
        core.tap(f"{self._prefix}*", self._on_answer)
        self._shown = f"{shown or inbox}.q."
        core.tap(f"{self._shown}*", self._on_shown_answer)

    # Events of the connection:

    def up(self) -> None:
        self._unstored_since = 0.0
        self._up.set()

    def down(self) -> None:
        self._up.clear()
        for call in self._calls.values():
            if call.repeatable is None:
                call.fail(NotConnected(f"the connection broke while waiting for an answer on {call.subject}"))
            else:
                call.fail(_Disconnected())

    def unstored_s(self, now: float) -> float:
        """Return for how long publishes have failed; 0 after a success."""
        waiting = max((now - call.asked_at for call in self._calls.values() if call.asked_at), default=0.0)
        return max(waiting, self._last_unstored - self._unstored_since if self._unstored_since else 0.0)

    def repeat_unanswered(self, now: float) -> None:
        """Repeat calls that have been unanswered for a while: the recipient may be gone, and another server leads by now."""
        for call in self._calls.values():
            if call.is_due_again(now) and self._core.send_now(call.cmd):
                call.sent_again = True
                metrics.CALLS_REPEATED.inc()

    def denied(self, text: str) -> None:
        """Fail the calls that a reported permission violation belongs to."""
        error = AccessDenied(f"the NATS server denies it: {text}")
        quoted = text.partition('"')[2].partition('"')[0]
        if quoted.startswith((self._prefix.lower(), self._shown.lower())):
            self._denied = text
        for call in self._calls.values():
            if call.subject.lower() == quoted or self._denied:
                call.fail(error)

    def _on_answer(self, subject: bytes, _reply: bytes, data: bytes, headers: bytes | None) -> None:
        self._answer(subject[self._skip :], data, headers)

    def _on_shown_answer(self, subject: bytes, _reply: bytes, data: bytes, headers: bytes | None) -> None:
        self._answer(_SHOWN + subject[len(self._shown) :], data, headers)

    def _answer(self, number: bytes, data: bytes, headers: bytes | None) -> None:
        call = self._calls.get(number)
        if call is not None and call.future is not None and not call.future.done():
            call.future.set_result(ServerReply(data, wire.status_of(headers) if headers else 0, headers))

    # Calls:

    def _open(
        self, subject: str, data: bytes, header: bytes | None, *, repeatable: bool | None, shown: bool = False
    ) -> tuple[bytes, Call]:
        size = len(data) + (len(header) if header else 0)
        if size > self._core.max_payload:
            raise PayloadTooLarge(
                f"a message of {size} bytes to {subject} is over the server's limit of {self._core.max_payload}"
            )
        if shown:
            token = secrets.token_hex(8)
            number, reply = _SHOWN + token.encode(), self._shown + token
        else:
            number = b"%d" % next(self._numbers)
            reply = self._prefix + number.decode()
        cmd = wire.pub(subject, data, reply) if header is None else wire.hpub(subject, data, header, reply)
        call = Call(subject, cmd, repeatable=repeatable)
        self._calls[number] = call
        return number, call

    def _close(self, number: bytes, call: Call) -> None:
        del self._calls[number]
        if call.timer is not None:
            call.timer.cancel()
        if call.asked_at and (now := self._loop.time()) > call.asked_at + AGAIN_S:  # also one that its caller gave up
            self._unstored_since = self._unstored_since or call.asked_at
            self._last_unstored = now

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, shown: bool = False, repeated: bool = False
    ) -> ServerReply:
        """Send a request and return its answer. Raises NoResponder, RequestTimeout, NotConnected, AccessDenied.

        `shown`: another process than the server sees it. `repeated`: it may be sent more than once while no answer comes.
        """
        if not self._core.up:
            raise NotConnected(f"not connected, {subject} was not asked")
        loop = self._loop
        number, call = self._open(subject, data, None, repeatable=None, shown=shown)
        call.repeated = repeated
        call.future = loop.create_future()
        call.timer = loop.call_later(timeout_s, call.expire)
        try:
            if not self._core.send_now(call.cmd):
                raise NotConnected(f"the connection takes no more, {subject} was not asked")
            answer = await call.future
        finally:
            self._close(number, call)
        if answer.status == 503:
            raise NoResponder(f"nobody listens on {subject}")
        return answer

    async def publish(self, subject: str, data: bytes, headers: dict[str, str], *, timeout_s: float) -> PubAck:
        """Store one message. With a `Nats-Msg-Id` it is sent again after a broken connection."""
        number, call = self._open(
            subject, data, wire.encode_headers(headers) if headers else None, repeatable=wire.MSG_ID in headers
        )
        loop = self._loop
        call.asked_at = loop.time()
        call.deadline = call.asked_at + timeout_s
        call.timer = loop.call_at(call.deadline, self._expire_publish, call)
        try:
            ack = await self._publish(call)
        except JetStreamError as error:
            raise self._failed(error) from None
        finally:
            self._close(number, call)
        return ack

    async def publish_all(
        self, messages: Sequence[tuple[str, bytes, dict[str, str]]], *, timeout_s: float
    ) -> list[PubAck | JetStreamError]:
        """Store messages, each by itself, with one wait for the first answers to all. Returns the ack or the error of each.

        Messages that their first answer does not confirm continue as in `publish`.
        """
        loop, group = self._loop, AckGroup[ServerReply]()
        outcomes: list[PubAck | JetStreamError] = []
        opened: list[tuple[int, bytes, Call]] = []
        now = loop.time()
        for subject, data, headers in messages:
            outcomes.append(PublishUnknown(f"{subject} was not tried"))
            try:
                header = wire.encode_headers(headers) if headers else None
                number, call = self._open(subject, data, header, repeatable=wire.MSG_ID in headers)
            except JetStreamError as error:
                outcomes[-1] = self._failed(error)
                continue
            call.asked_at, call.deadline = now, now + timeout_s
            opened.append((len(outcomes) - 1, number, call))
            if self._core.send_now(call.cmd):
                call.future = group.part()
        timer = loop.call_at(now + timeout_s, self._expire_all, [call for _, _, call in opened])
        try:
            await group.all()
            left = [(place, call) for place, _, call in opened if not self._confirmed(call, place, outcomes)]
            for (place, _), outcome in zip(left, await asyncio.gather(*(self._go_on(call) for _, call in left)), strict=True):
                outcomes[place] = outcome
        finally:
            timer.cancel()
            for _, number, call in opened:
                self._close(number, call)
        return outcomes

    def _expire_all(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self._expire_publish(call)

    def _confirmed(self, call: Call, place: int, outcomes: list[PubAck | JetStreamError]) -> bool:
        """Put the ack of a publish of a group into its slot, if its first answer is one."""
        answer = call.future.outcome if isinstance(call.future, AckPart) else None
        if not isinstance(answer, ServerReply) or answer.status == 503:
            return False
        reply = _pub_reply.decode(answer.data)
        if reply.error is not None:
            return False
        outcomes[place] = _ack_of(reply)
        self._note_stored(call)
        return True

    async def _go_on(self, call: Call) -> PubAck | JetStreamError:
        """Return the outcome of a publish of a group that its first answer did not confirm, or that was not sent."""
        first = call.future.outcome if isinstance(call.future, AckPart) else None
        call.timer = self._loop.call_at(call.deadline, self._expire_publish, call)
        try:
            ack = await self._publish(call, first)
        except JetStreamError as error:
            return self._failed(error)
        return ack

    def _failed(self, error: JetStreamError) -> JetStreamError:
        metrics.PUBLISHES.labels(type(error).__name__).inc()
        return error

    def _note_stored(self, call: Call) -> None:
        call.asked_at = self._unstored_since = 0.0
        _stored.inc()

    def _expire_publish(self, call: Call) -> None:
        call.timed_out = True
        call.fail(PublishUnknown(f"no word from the server about {call.subject} in time: it may or may not be stored"))

    async def _publish(self, call: Call, first: ServerReply | BaseException | None = None) -> PubAck:
        """Send a publish until it is confirmed or refused. `first`: the outcome of the first try, if it was made."""
        loop = self._loop
        pause_s = RETRY_FIRST_S
        refused = 0
        unknown = False
        while True:
            future = call.future = loop.create_future()
            if first is not None:
                _repeat(first, future)
                first = None
            elif call.timed_out:
                self._expire_publish(call)
            elif not self._core.send_now(call.cmd):
                call.future = None  # no caller awaits it now, so asyncio would report its failure as never retrieved
                await self._until_sendable(call)
                continue
            try:
                answer = await future
            except _Disconnected:
                if not call.repeatable:
                    raise PublishUnknown(f"the connection broke while {call.subject} waited for its ack") from None
                unknown = True
                metrics.PUBLISH_RETRIES.inc()
                await self._until_sendable(call)
                continue
            unknown = unknown or call.sent_again
            last: JetStreamError
            if answer.status == 503:
                refused += 1
                last = NoLeader(f"no server takes {call.subject} for its stream")
                if unknown:
                    last = PublishUnknown(f"the stream of {call.subject} went away while a message was on its way")
                elif refused >= 3 and await self._no_stream(call.subject):
                    raise TopologyError(f"no stream takes {call.subject}")
            else:
                reply = _pub_reply.decode(answer.data)
                if reply.error is None:
                    self._note_stored(call)
                    return _ack_of(reply)
                last = api.publish_fault(reply.error, call.subject)
                if reply.error.err_code not in (*api.NOT_READY, api.TOO_MANY_REQUESTS, api.BEING_STORED):
                    raise last
                if unknown and isinstance(last, NoLeader):
                    last = PublishUnknown(f"a message to {call.subject} was on its way before it was refused: {last}")
            metrics.PUBLISH_RETRIES.inc()
            await self._pause(call, pause_s, last)
            pause_s = min(pause_s * 2, RETRY_MAX_S)

    async def _until_sendable(self, call: Call) -> None:
        """Wait for the connection, or for room in its buffer, no longer than the call's timer."""
        try:
            async with asyncio.timeout_at(call.deadline):
                if self._up.is_set():
                    await asyncio.sleep(RETRY_FIRST_S)
                else:
                    await self._up.wait()
        except TimeoutError:
            raise PublishUnknown(f"not connected: {call.subject} was not confirmed in time") from None

    async def _pause(self, call: Call, pause_s: float, last: JetStreamError) -> None:
        if asyncio.get_running_loop().time() + pause_s >= call.deadline:
            raise last  # where the server refused every try, the message is certainly not stored, and the error says so
        await asyncio.sleep(pause_s)

    async def _no_stream(self, subject: str) -> bool:
        """Return True if the server answers and knows no stream for the subject, so that more tries are useless."""
        try:
            names = await self.request(
                f"{self._api_prefix}.STREAM.NAMES", msgspec.json.encode({"subject": subject}), timeout_s=RETRY_MAX_S
            )
        except JetStreamError:
            return False
        told = msgspec.json.decode(names.data)
        return "error" not in told and not told.get("total", 0)  # servers that elect their leader answer with an error


def _ack_of(reply: _PubReply) -> PubAck:
    return PubAck(reply.stream, reply.seq, reply.duplicate, None if reply.val is None else int(reply.val))


def _repeat(outcome: ServerReply | BaseException, future: asyncio.Future[ServerReply]) -> None:
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


_stored = metrics.PUBLISHES.labels("stored")
