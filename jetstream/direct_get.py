"""Reads of stored messages and stream state without a consumer, and the interface of a connection (`ServerSession`)."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from itertools import count
from typing import Any, Protocol

import msgspec

from headrace.jetstream import wire
from headrace.jetstream.api import MESSAGE_NOT_FOUND, STREAM_NOT_FOUND, ApiError, JsApi
from headrace.jetstream.errors import JetStreamError, NotConnected, RequestTimeout, TopologyError
from headrace.jetstream.ports import PubAck, StoredMessage, StreamState
from headrace.jetstream.raw_client import CoreClient, RawHandler

PAGE = 256  # messages per direct batch read
PAGE_BYTES = 8 * 1024 * 1024
SUBJECTS_PER_READ = 500  # the server refuses to find the last message of more than 1024 subjects at once


class _RawMessage(msgspec.Struct, frozen=True):
    subject: str
    seq: int
    data: str = ""
    hdrs: str = ""
    time: str = ""


class _GetAnswer(msgspec.Struct, frozen=True):
    message: _RawMessage


class Reader:
    def __init__(self, core: CoreClient, api: JsApi, inbox: str) -> None:
        self._core = core
        self._api = api
        self._prefix = f"{inbox}.r."
        self._skip = len(self._prefix)
        self._numbers = count(1)
        self._reads: dict[bytes, tuple[RawHandler, asyncio.Future[None]]] = {}
        # One subscription for all reads: a server forgets what it knows about its subjects at every change of subscriptions.
        core.tap(f"{self._prefix}*", self._on_message)

    def down(self) -> None:
        """Fail the batch reads that are under way: their answers were sent into the broken connection."""
        for _, end in self._reads.values():
            if not end.done():
                end.set_exception(NotConnected("the connection broke during a read"))

    async def message(
        self, stream: str, *, seq: int | None = None, last_of: str | None = None, timeout_s: float | None = None
    ) -> StoredMessage | None:
        """Read one message by sequence, or the last of a subject, from the stream's leader, which is never stale."""
        return await self._one(stream, {"seq": seq} if last_of is None else {"last_by_subj": last_of}, timeout_s)

    async def _one(self, stream: str, query: Mapping[str, Any], timeout_s: float | None) -> StoredMessage | None:
        try:
            answer = await self._api.call(f"STREAM.MSG.GET.{stream}", query, timeout_s=timeout_s)
        except ApiError as error:
            if error.err_code in MESSAGE_NOT_FOUND:
                return None
            raise _about_stream(error, stream) from None
        raw = msgspec.convert(answer, _GetAnswer).message
        return StoredMessage(
            subject=raw.subject,
            seq=raw.seq,
            data=base64.b64decode(raw.data),
            headers=wire.decode_headers(base64.b64decode(raw.hdrs)) if raw.hdrs else None,
            at=datetime.fromisoformat(raw.time).timestamp() if raw.time else 0.0,
        )

    async def age_s(self, stream: str, message: StoredMessage) -> float:
        """Return how long ago a message that `message` has read was stored, by the server's clock."""
        try:
            info = await self._api.call(f"STREAM.INFO.{stream}")
        except ApiError as error:
            raise _about_stream(error, stream) from None
        return datetime.fromisoformat(info["ts"]).timestamp() - message.at

    async def delete(self, stream: str, seq: int) -> bool:
        try:
            await self._api.call(f"STREAM.MSG.DELETE.{stream}", {"seq": seq, "no_erase": True})
        except ApiError as error:
            if error.err_code in MESSAGE_NOT_FOUND:
                return False
            raise _about_stream(error, stream) from None
        return True

    async def state(self, stream: str, *, subject: str = "") -> StreamState:
        try:
            info = await self._api.call(f"STREAM.INFO.{stream}")
        except ApiError as error:
            raise _about_stream(error, stream) from None
        last = await self.message(stream, last_of=subject) if subject else None
        state = info["state"]
        return StreamState(
            first_seq=state["first_seq"] if state["messages"] else state["last_seq"] + 1,
            last_seq=state["last_seq"],
            messages=state["messages"],
            created=info["created"],
            last_of_subject=last.seq if last is not None else 0,
            bytes=state.get("bytes", 0),
            max_bytes=info.get("config", {}).get("max_bytes", -1),
        )

    async def purge(self, stream: str, *, subject: str = "", up_to_seq: int = 0) -> int:
        query: dict[str, Any] = {}
        if subject:
            query["filter"] = subject
        if up_to_seq:
            query["seq"] = up_to_seq + 1  # the server keeps the message with this sequence
        try:
            answer = await self._api.call(f"STREAM.PURGE.{stream}", query or None)
        except ApiError as error:
            raise _about_stream(error, stream) from None
        return int(answer.get("purged", 0))

    async def subject_counts(self, stream: str, pattern: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        while True:
            try:
                info = await self._api.call(f"STREAM.INFO.{stream}", {"subjects_filter": pattern, "offset": len(counts)})
            except ApiError as error:
                raise _about_stream(error, stream) from None
            page: Mapping[str, int] = info["state"].get("subjects") or {}
            counts.update(page)
            if not page or len(counts) >= info.get("total", 0):
                return counts

    async def consumer_subjects(self, stream: str) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        offset = 0
        while True:
            try:
                page = await self._api.call(f"CONSUMER.LIST.{stream}", {"offset": offset})
            except ApiError as error:
                raise _about_stream(error, stream) from None
            consumers = page.get("consumers") or []
            for consumer in consumers:
                config = consumer["config"]
                one = config.get("filter_subject")
                found[consumer["name"]] = tuple(config.get("filter_subjects") or ((one,) if one else ()))
            offset += len(consumers)
            if not consumers or offset >= page.get("total", 0):
                return found

    async def following(
        self, stream: str, subject: str, *, limit: int, start_seq: int = 1, timeout_s: float = 5.0
    ) -> list[StoredMessage]:
        """Return the stored messages of one subject (or pattern) from a sequence on, oldest first."""
        if self._api.is_asked(f"STREAM.MSG.GET.{stream}"):
            return await self._following_one_by_one(stream, subject, limit, start_seq, timeout_s)
        found: list[StoredMessage] = []
        seq = start_seq
        while len(found) < limit:
            page = await self.batch(
                stream,
                {"seq": seq, "next_by_subj": subject, "batch": min(PAGE, limit - len(found)), "max_bytes": PAGE_BYTES},
                timeout_s=timeout_s,
            )
            found += page
            if not page:
                break
            seq = page[-1].seq + 1
        return found

    async def _following_one_by_one(
        self, stream: str, subject: str, limit: int, start_seq: int, timeout_s: float
    ) -> list[StoredMessage]:
        """Do the same by calls of a steward, which reads single messages only."""
        found: list[StoredMessage] = []
        if not await self.subject_counts(stream, subject):
            return found
        seq = start_seq
        while len(found) < limit:
            message = await self._one(stream, {"seq": seq, "next_by_subj": subject}, timeout_s)
            if message is None:
                break
            found.append(message)
            seq = message.seq + 1
        return found

    async def last_of_each(self, stream: str, pattern: str, *, timeout_s: float = 5.0) -> list[StoredMessage]:
        try:
            return await self.batch(stream, {"multi_last": [pattern], "batch": 1000}, timeout_s=timeout_s)
        except _TooMany:
            subjects = sorted(await self.subject_counts(stream, pattern))
        return await self.last_of_subjects(stream, subjects, timeout_s=timeout_s)

    async def last_of_subjects(self, stream: str, subjects: Sequence[str], *, timeout_s: float = 5.0) -> list[StoredMessage]:
        found: list[StoredMessage] = []
        for start in range(0, len(subjects), SUBJECTS_PER_READ):
            found += await self._last_of_some(stream, list(subjects[start : start + SUBJECTS_PER_READ]), timeout_s)
        return found

    async def _last_of_some(self, stream: str, subjects: list[str], timeout_s: float) -> list[StoredMessage]:
        try:
            return await self.batch(stream, {"multi_last": subjects, "batch": len(subjects)}, timeout_s=timeout_s)
        except _TooMany:  # more bytes than the server sends for one read
            if len(subjects) == 1:
                raise
            half = len(subjects) // 2
            first = await self._last_of_some(stream, subjects[:half], timeout_s)
            return first + await self._last_of_some(stream, subjects[half:], timeout_s)

    async def batch(self, stream: str, query: Mapping[str, Any], *, timeout_s: float) -> list[StoredMessage]:
        """Read many messages with one direct get: they arrive one by one at an inbox, closed by an end marker.

        Raises TopologyError, RequestTimeout, NotConnected.
        """
        if not self._core.up:
            raise NotConnected(f"not connected, {stream} was not read")
        found: list[StoredMessage] = []
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_message(subject: bytes, _reply: bytes, data: bytes, raw: bytes | None) -> None:
            if end.done():
                return
            headers = wire.decode_headers(raw)
            status = headers.get(wire.STATUS)
            if status is None:
                own = {k: v for k, v in headers.items() if k not in wire.READ_HEADERS}
                found.append(
                    StoredMessage(
                        headers.get(wire.SUBJECT) or subject.decode(),
                        int(headers[wire.SEQUENCE]),
                        data,
                        own or None,
                        wire.unix_time(headers.get(wire.TIME_STAMP, "")),
                    )
                )
            elif status in ("204", "404"):
                if status == "204" and headers.get(wire.NUM_PENDING, "0") != "0" and "multi_last" in query:
                    end.set_exception(_TooMany())
                else:
                    end.set_result(None)
            elif status == "413":
                end.set_exception(_TooMany())
            elif status == "503":
                end.set_exception(TopologyError(f"there is no stream {stream} that can be read directly"))
            else:
                end.set_exception(JetStreamError(f"reading {stream} failed: {status} {headers.get(wire.DESCRIPTION, '')}"))

        number = b"%d" % next(self._numbers)
        self._reads[number] = on_message, end
        reply = self._prefix + number.decode()
        try:
            async with asyncio.timeout(timeout_s):
                if not self._core.send_now(
                    wire.pub(self._api.subject(f"DIRECT.GET.{stream}"), msgspec.json.encode(query), reply)
                ):
                    raise NotConnected(f"not connected, {stream} was not read")
                await end
        except TimeoutError:
            raise RequestTimeout(f"reading {stream} took longer than {timeout_s} s") from None
        finally:
            del self._reads[number]
        return found

    def _on_message(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        read = self._reads.get(subject[self._skip :])
        if read is not None:  # not one that was given up
            read[0](subject, reply, data, headers)


class _TooMany(JetStreamError):
    """More matches than one direct read returns."""


def _about_stream(error: ApiError, stream: str) -> JetStreamError:
    return TopologyError(f"there is no stream {stream}") if error.err_code == STREAM_NOT_FOUND else error


class ServerSession(Protocol):
    """A connection to a server, as the modules of this package use it. `headrace.jetstream.client.Connection` implements it.

    Modules take this protocol and not the connection, because the connection constructs them: no import runs in a circle.
    """

    api: JsApi
    reader: Reader

    @property
    def core(self) -> CoreClient:
        """The client underneath, for taps and raw writes."""

    @property
    def inbox(self) -> str:
        """The prefix of all inbox subjects of this connection."""

    def hooks(self, *, up: Callable[[], None], down: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `up` and `down` as the connection comes and goes, while the context is open."""

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        msg_id: str | None = None,
        ttl_s: float | None = None,
        expect_last_subject_seq: int | None = None,
        timeout_s: float = 2.0,
    ) -> PubAck:
        """Store a message, as `headrace.jetstream.ports.Messaging.publish` does."""
