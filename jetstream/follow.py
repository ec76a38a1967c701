"""Reads a stream in order from a sequence on, and keeps following it; implements `ports.Follow`.

Each follow has a pull consumer of its own, without acks, that the server keeps in memory and removes soon after the reader is
gone.  It delivers in order and numbers its deliveries, so a missing one (a broken connection, a lost message) shows at once,
and the follow continues with a new consumer behind the last message that it has.  It pulls only while the reader keeps up,
which is the back pressure.

The consumer does not report messages that were removed before it reached them.  So whenever a consumer is made, the stream's
first sequence is compared with the one to continue from.  For the same reason a quiet reader advances its position now and
then: otherwise messages of other subjects that expire would look like a gap.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import structlog

from headrace.jetstream import metrics, wire
from headrace.jetstream.api import STREAM_NOT_FOUND, ApiError
from headrace.jetstream.direct_get import ServerSession
from headrace.jetstream.errors import JetStreamError, StreamTrimmed, TopologyError
from headrace.jetstream.ports import MessageBatch, StoredMessage
from headrace.jetstream.raw_client import NUID, Tap

log = structlog.get_logger(__name__)

HEARTBEAT_S = 0.5
SILENCE_S = 2 * HEARTBEAT_S + 0.25
EXPIRES_S = 5.0
INACTIVE_S = 10.0  # a reader that stood still for longer gets a new consumer, and with it the check for removed messages
IDLE_CHECK_S = 30.0
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
CREATE_TIMEOUT_S = 2.0

_names = NUID()


class StreamFollow:
    """A reader of a stream; implements `ports.Follow`."""

    def __init__(self, session: ServerSession, stream: str, subject: str, *, start_seq: int, batch: int = 128) -> None:
        self.stream = stream
        self.subject = subject
        self._session = session
        self._core = session.core
        self._batch = batch
        self._position = max(0, start_seq - 1)  # last sequence handed out
        self._read = self._position  # last sequence received
        self._created = ""
        self._buffer: list[StoredMessage] = []
        self._pending = 0
        self._consumer = ""
        self._tap: Tap | None = None
        self._next_delivery = 1
        self._outstanding = 0
        self._heard_at = 0.0
        self._idle_since = asyncio.get_running_loop().time()
        self._backoff_s = 0.0
        self._inbox = ""
        self._wake = asyncio.Event()
        self._hooks = contextlib.ExitStack()
        self._hooks.enter_context(session.hooks(up=self._on_up, down=self._on_down))

    @property
    def position(self) -> int:
        return self._position

    async def next(self) -> MessageBatch:
        while True:
            if self._core.up:
                if self._consumer:
                    self._ask()
                else:
                    await self._open()
            if self._buffer or self._read > self._position:
                return self._take()
            await self._sleep()
            self._look_for_silence()
            if asyncio.get_running_loop().time() - self._idle_since > IDLE_CHECK_S:
                await self._move_on()

    async def close(self) -> None:
        self._hooks.close()
        self._leave()

    def _take(self) -> MessageBatch:
        messages, self._buffer = self._buffer, []
        self._position = self._read
        self._idle_since = asyncio.get_running_loop().time()
        return MessageBatch(messages, self._position, self._pending)

    # The consumer:

    async def _open(self) -> None:
        try:
            await self._check_not_trimmed()
            await self._create()
        except StreamTrimmed:
            self._leave()
            raise
        except JetStreamError as error:
            self._leave()
            self._backoff_s = min(max(self._backoff_s * 2, BACKOFF_FIRST_S), BACKOFF_MAX_S)
            log.info("follow.not_started", stream=self.stream, subject=self.subject, error=str(error))
            await asyncio.sleep(self._backoff_s)

    async def _check_not_trimmed(self) -> None:
        state = await self._session.reader.state(self.stream)
        wanted = self._read + 1
        other = bool(self._created) and state.created != self._created
        if state.first_seq > wanted or state.last_seq < self._read or other:
            raise StreamTrimmed(
                f"{self.stream} has messages {state.first_seq} to {state.last_seq} (created {state.created}), "
                f"the next one wanted is {wanted}",
                wanted=wanted,
                first_seq=state.first_seq,
                last_seq=state.last_seq,
            )
        self._created = state.created

    async def _create(self) -> None:
        name = f"follow_{_names.next().decode()}"
        inbox = f"{self._session.inbox}.{name}"
        self._next_delivery, self._outstanding = 1, 0
        self._heard_at = asyncio.get_running_loop().time()
        config = {
            "name": name,
            "description": "a reader of headrace",
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._read + 1,
            "ack_policy": "none",
            "filter_subject": self.subject,
            "replay_policy": "instant",
            "inactive_threshold": wire.nanoseconds(INACTIVE_S),
            "mem_storage": True,
            "num_replicas": 1,
        }
        metrics.FOLLOW_RESTARTS.labels("start" if not self._consumer else "again").inc()
        try:
            answer = await self._session.api.call(
                f"CONSUMER.CREATE.{self.stream}.{name}.{self.subject}",
                {"stream_name": self.stream, "config": config},
                timeout_s=CREATE_TIMEOUT_S,
            )
        except ApiError as error:
            if error.err_code == STREAM_NOT_FOUND:
                raise TopologyError(f"there is no stream {self.stream}") from None
            raise
        self._consumer = name
        self._tap = self._core.tap(inbox, self._on_message)
        self._inbox = inbox
        self._pending = int(answer.get("num_pending", 0))
        self._backoff_s = 0.0
        self._ask()

    def _ask(self) -> None:
        """Request a batch, unless one is waiting for the reader."""
        missing = self._batch - self._outstanding
        if not self._consumer or len(self._buffer) >= self._batch or missing < max(1, self._batch // 2):
            return
        request = {"batch": missing, "expires": wire.nanoseconds(EXPIRES_S), "idle_heartbeat": wire.nanoseconds(HEARTBEAT_S)}
        subject = self._session.api.subject(f"CONSUMER.MSG.NEXT.{self.stream}.{self._consumer}")
        if self._outstanding == 0:
            self._heard_at = asyncio.get_running_loop().time()
        if self._core.send_now(wire.pub(subject, msgspec.json.encode(request), self._inbox)):
            self._outstanding += missing

    def _leave(self) -> None:
        if self._tap is not None:
            self._core.untap(self._tap)
            self._tap = None
        if self._consumer and self._core.up:
            # The answer is not awaited: a consumer that this request does not reach expires by inactivity.
            deletion = self._session.api.subject(f"CONSUMER.DELETE.{self.stream}.{self._consumer}")
            self._core.send_now(wire.pub(deletion, b""))
        self._consumer = ""
        self._outstanding = 0

    def _break(self, reason: str) -> None:
        """Continue with a new consumer, because a message may be missing."""
        metrics.FOLLOW_RESTARTS.labels(reason).inc()
        self._leave()
        self._wake.set()

    # Received messages:

    def _on_message(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        status = wire.status_of(headers)
        if status:
            if status != 100:
                self._on_status(status, wire.decode_headers(headers))
            return
        parts = reply.split(b".")
        # $JS.ACK.<stream>.<consumer>.<times>.<seq>.<number>.<time>.<pending>, or with domain and account after ACK
        seq, delivery, stamp, pending = map(int, parts[5:9] if len(parts) == 9 else parts[7:11])
        if delivery != self._next_delivery:
            self._break("gap")
            return
        self._next_delivery += 1
        self._outstanding = max(0, self._outstanding - 1)
        self._read = seq
        self._pending = pending
        own = wire.decode_headers(headers) or None if headers is not None else None
        self._buffer.append(StoredMessage(subject.decode(), seq, data, own, stamp / 1e9))
        self._wake.set()

    def _on_status(self, status: int, fields: dict[str, str]) -> None:
        left = fields.get(wire.PENDING_MESSAGES, "")
        if status == 408 and left.isdigit():  # a request has expired
            self._outstanding = max(0, self._outstanding - int(left))
            self._wake.set()
            return
        log.info("follow.refused", stream=self.stream, status=status, reason=fields.get(wire.DESCRIPTION, ""))
        self._break(str(status))

    def _on_up(self) -> None:
        self._backoff_s = 0.0
        self._wake.set()

    def _on_down(self) -> None:
        self._break("disconnected")

    # Waiting:

    async def _sleep(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_S):
                await self._wake.wait()
        self._wake.clear()

    def _look_for_silence(self) -> None:
        if self._consumer and self._outstanding and asyncio.get_running_loop().time() - self._heard_at > SILENCE_S:
            log.info("follow.silent", stream=self.stream, subject=self.subject)
            self._break("silent")

    async def _move_on(self) -> None:
        """Advance the position to the stream's end after a long silence, if the last message of the subject was read."""
        self._idle_since = asyncio.get_running_loop().time()
        with contextlib.suppress(JetStreamError):
            state = await self._session.reader.state(self.stream, subject=self.subject)
            if state.created == self._created and state.last_of_subject <= self._read:
                self._read = max(self._read, state.last_seq)
