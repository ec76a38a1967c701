"""Calls of the JetStream API with JSON bodies and typed errors, and the distinction of published from stored messages.

The server sends stored messages to the same inboxes as answers. A message read from a stream carries headers of its place
there, and a pulled one keeps its own subject. Subscriptions drop such messages, and requests are answered at inboxes only.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from headrace.jetstream.errors import (
    DiskFull,
    JetStreamDisabled,
    JetStreamError,
    NoLeader,
    NoResponder,
    PayloadTooLarge,
    PublishError,
    PublishUnknown,
    QueueFull,
    RequestTimeout,
    RevisionConflict,
    TopologyError,
)

INBOXES = (b"_INBOX", b"_R_.")  # of processes, and of those in other accounts

_STREAM_HEADERS = (b"\r\nnats-stream:", b"\r\nnats-subject:", b"\r\nnats-sequence:")


class SubjectPattern:
    """The subject of a subscription, with or without wildcards."""

    def __init__(self, subject: str) -> None:
        self._exact = subject.encode()
        self._tokens = self._exact.split(b".")
        self._wild = bool({b"*", b">"} & set(self._tokens))

    def covers(self, subject: bytes) -> bool:
        """Return True if the subscription receives messages published to this subject."""
        if not self._wild:
            return subject == self._exact
        given = subject.split(b".")
        for at, token in enumerate(self._tokens):
            if token == b">":
                return len(given) > at
            if at >= len(given) or token not in (b"*", given[at]):
                return False
        return len(given) == len(self._tokens)


def from_stream(headers: bytes) -> bool:
    """Return True for the header block of a message that the server read from a stream."""
    lowered = headers.lower()
    return any(name in lowered for name in _STREAM_HEADERS)


API = "$JS.API"  # prefix of the calls in an account that has JetStream itself
CONSUMER_CREATE = "CONSUMER.CREATE."
MOST_ANSWER = 16 * 1024 * 1024  # bytes of an answer of a steward
_COMPRESSED = b"x"  # begins what zlib has made, and no JSON
ASK_AGAIN_S = 0.2  # while no steward answers, and while a cluster elects

STREAM_NOT_FOUND = 10059
STREAM_IN_USE = 10058  # the name exists with another configuration
CONSUMER_NOT_MADE = 10012  # for whatever reason; the file that keeps its state may be damaged
CONSUMER_NOT_FOUND = 10014
MESSAGE_NOT_FOUND = (10037, 10043, 10057)  # no message at that place, no such sequence, deleted already
STORE_FAILED = 10077
WRONG_SEQUENCE = (10071, 10164)
NOT_ENABLED = (10039, 10076)
OUT_OF_RESOURCES = (10002, 10023, 10028, 10047)  # resources of the account, the server, memory, disk
TOO_LARGE = 10054
TOO_MANY_REQUESTS = 10167
TOO_FEW_SERVERS = (10005, 10074)  # for the copies that a stream should have; no cluster at all
NOT_READY = (10008, 10009, 10005, 10006)  # no leader, not leader, no peers, cluster changing: ask again
ELECTING = (10008, 10009)  # no server leads what a call is about: it was refused before anything was done
BEING_STORED = 10158  # an earlier copy under the same `Nats-Msg-Id` is not confirmed by the cluster yet

# Calls that are safe to repeat: they read, or make something that may exist already.
_REPEATED = (
    "INFO",
    "STREAM.INFO.",
    "STREAM.LIST",
    "STREAM.NAMES",
    "STREAM.MSG.GET.",
    "CONSUMER.INFO.",
    "CONSUMER.LIST.",
    "CONSUMER.NAMES.",
    CONSUMER_CREATE,
)

_FULL_SCOPES = (
    ("maximum messages per subject exceeded", "subject"),
    ("maximum messages exceeded", "stream"),
    ("maximum bytes exceeded", "bytes"),
)


class ApiFault(msgspec.Struct, frozen=True):
    """The `error` of an API answer."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class _Answer(msgspec.Struct, frozen=True):
    error: ApiFault | None = None


_answer = msgspec.json.Decoder(_Answer)


class ApiError(JetStreamError):
    def __init__(self, fault: ApiFault, what: str) -> None:
        super().__init__(f"{what}: {fault.description} (error {fault.err_code})")
        self.err_code = fault.err_code
        self.description = fault.description
        self.retriable = fault.err_code in NOT_READY


class Caller(Protocol):
    """A connection that can carry an API call."""

    async def request(self, subject: str, data: bytes, *, timeout_s: float, repeated: bool = False) -> bytes:
        """Send a request and return its answer. `repeated`: it may be sent more than once while no answer comes."""


class JsApi:
    """The JetStream API over one connection: plain dictionaries in the server's own field names.

    nats-py's records lack fields that Headrace needs (priority groups) and cost more than they save. With a `steward`,
    consumers and the calls that match a pattern of `asked` are requested at that subject (`headrace.jetstream.logins.steward`)
    instead of made by this login.
    """

    def __init__(
        self, caller: Caller, *, prefix: str = API, steward: str = "", asked: Iterable[str] = (), timeout_s: float = 5.0
    ) -> None:
        self._caller = caller
        self._prefix = f"{prefix}."
        self._timeout_s = timeout_s
        self.steward = steward
        self._asked = [SubjectPattern(pattern) for pattern in asked] if steward else []

    @property
    def elsewhere(self) -> bool:
        """True if the streams are in another account than this login: the server cannot push to its inboxes from there."""
        return bool(self.steward) or self._prefix != f"{API}."

    def is_asked(self, call: str) -> bool:
        """Return True for a call that goes to the steward."""
        if not self.steward:
            return False
        return call.startswith(CONSUMER_CREATE) or any(pattern.covers(call.encode()) for pattern in self._asked)

    def subject(self, call: str) -> str:
        return self._prefix + call

    async def call(self, subject: str, body: Any = None, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Call the API. While a cluster elects who answers, the call is made again until its time is over.

        Raises ApiError, JetStreamDisabled, AccessDenied, RequestTimeout, NotConnected.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (timeout_s or self._timeout_s)
        left_s = timeout_s or self._timeout_s
        while True:
            try:
                return await self._call(subject, body, left_s)
            except ApiError as error:
                left_s = deadline - loop.time() - ASK_AGAIN_S
                if error.err_code not in ELECTING or left_s <= 0:
                    raise
            await asyncio.sleep(ASK_AGAIN_S)

    async def _call(self, subject: str, body: Any, timeout_s: float) -> dict[str, Any]:
        asked = self.steward if self.is_asked(subject) else ""
        if asked:
            data = msgspec.json.encode({"call": subject, "body": body})
        else:
            data = b"" if body is None else msgspec.json.encode(body)
        to = asked or self._prefix + subject
        try:
            if asked:
                raw = await self._from_steward(to, data, timeout_s=timeout_s)
            else:
                raw = await self._caller.request(to, data, timeout_s=timeout_s, repeated=subject.startswith(_REPEATED))
        except NoResponder:
            raise JetStreamDisabled(
                f"JetStream does not answer on {to}: it is not enabled for this server or account"
            ) from None
        except RequestTimeout as error:
            raise RequestTimeout(str(error) if asked else f"the JetStream API did not answer {to} in time") from None
        if asked and raw.startswith(_COMPRESSED):
            raw = zlib.decompressobj().decompress(raw, MOST_ANSWER)
        fault = _answer.decode(raw).error
        if fault is not None:
            if fault.err_code in NOT_ENABLED:
                raise JetStreamDisabled(f"JetStream is not enabled for this server or account: {fault.description}")
            raise ApiError(fault, subject)
        answer: dict[str, Any] = msgspec.json.decode(raw)
        return answer

    async def _from_steward(self, to: str, data: bytes, *, timeout_s: float) -> bytes:
        """Call the steward, repeatedly while there is none: it may start later than this process. Raises RequestTimeout."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            left_s = deadline - asyncio.get_running_loop().time()
            try:
                return await self._caller.request(to, data, timeout_s=max(left_s, ASK_AGAIN_S))
            except NoResponder:
                if left_s <= ASK_AGAIN_S:
                    raise RequestTimeout(f"no steward answers on {to}, which this login asks for such calls") from None
            await asyncio.sleep(ASK_AGAIN_S)


def publish_fault(fault: ApiFault, subject: str) -> JetStreamError:
    """Return the exception for a refused publish."""
    code, text = fault.err_code, fault.description
    if code in WRONG_SEQUENCE:
        return RevisionConflict(f"{subject} was changed by somebody else: {text}")
    if code == STORE_FAILED:
        # The server wraps every error of its store into this code; only the text distinguishes a full queue from a full disk.
        for words, scope in _FULL_SCOPES:
            if words in text:
                return QueueFull(f"the queue for {subject} is full: {text}", subject=subject, scope=scope)
        return DiskFull(f"the server could not store {subject}: {text}")
    if code == TOO_MANY_REQUESTS:
        return QueueFull(f"the server takes no more at this rate for {subject}: {text}", subject=subject, scope="stream")
    if code in OUT_OF_RESOURCES:
        return DiskFull(f"the server has no storage left for {subject}: {text}")
    if code == TOO_LARGE:
        return PayloadTooLarge(f"a message to {subject} is larger than its stream takes: {text}")
    if code in NOT_ENABLED:
        return TopologyError(f"no stream takes {subject}: {text}")
    if code in NOT_READY:
        return NoLeader(f"{subject} was not stored: {text}")
    if code == BEING_STORED:
        return PublishUnknown(f"{subject} is being stored: {text}")
    return PublishError(f"{subject} was not stored: {text} (error {code})")
