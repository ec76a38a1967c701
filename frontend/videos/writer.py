"""Writes the result of a video's job: the file in base64, with its size and length as they are in the file."""

from __future__ import annotations

import asyncio
import binascii
import struct

import msgspec

from headrace.broker.errors import BrokerError
from headrace.broker.messages import Finish, Row
from headrace.frontend.errors import FrontendError
from headrace.frontend.images.writer import Results
from headrace.frontend.videos.schema import VideoAnswer
from headrace.frontend.writers.base import StreamWriter, WholeWriter
from headrace.frontend.writers.usage import UsageCounter

MOST_BYTES = 64 << 20  # of a file: a frontend has it in memory several times while it stores the result


class VideoTooLarge(FrontendError, status=500, code="video_too_large"):
    """The worker's file is larger than a result may be."""


class VideoWriter(WholeWriter):
    """Takes the one file, and fetches one that was too large for a frame."""

    def __init__(self, created: int, counter: UsageCounter, results: Results | None) -> None:
        self.open = 1
        self.unsettled = True
        self._created = created
        self._counter = counter
        self._results = results
        self._end: Finish | None = None
        self._body = b""

    def take(self, rows: list[Row]) -> None:
        for row in rows:
            if row.fin is not None:
                self._end = row.fin
                self._counter.end(0, row.fin)
                self.open = 0

    async def settle(self) -> None:
        """Fetch what is missing and make the body. Raises BrokerError, VideoTooLarge."""
        if self._end is None:
            raise BrokerError("a video has ended without a file")
        spill = self._end.spill
        size = len(self._end.vector) if spill is None else spill.size
        if size > MOST_BYTES:
            raise VideoTooLarge(f"the video has {size} bytes; a result has at most {MOST_BYTES}")
        file = self._end.vector
        if spill is not None:
            if self._results is None:
                raise BrokerError("a video lies in the object store, which this frontend does not read")
            file = await self._results.get(spill)
        self._body = await asyncio.to_thread(_answer, self._created, file)

    def body(self) -> bytes:
        return self._body


class VideoEvents(StreamWriter):
    """Makes no events: a video's job is a durable stream only so that its beginning is seen."""

    def __init__(self, whole: VideoWriter) -> None:
        self.open = 1
        self.unsettled = True
        self._whole = whole

    def events(self, rows: list[Row]) -> bytes:
        if any(row.fin is not None for row in rows):
            self.open = 0
        return b""

    async def settle(self) -> None:
        """Make the whole answer. Raises as `VideoWriter.settle`."""
        await self._whole.settle()

    def closing(self) -> bytes:
        return b""

    def failure(self, error: FrontendError) -> bytes:
        """Return nothing: the result tells the error."""
        return b""


def _answer(created: int, file: bytes) -> bytes:
    width, height, seconds = measures(file)
    text = binascii.b2a_base64(file, newline=False).decode()
    return msgspec.json.encode(VideoAnswer(created=created, size=f"{width}x{height}", seconds=f"{seconds:g}", b64_json=text))


def measures(file: bytes) -> tuple[int, int, float]:
    """Return width, height and seconds of an MP4 file; zeros for what it does not say."""
    movie = _inside(memoryview(file), b"moov")
    head, track = _inside(movie, b"mvhd"), _inside(_inside(movie, b"trak"), b"tkhd")
    seconds = 0.0
    if len(head) >= 32:
        scale, duration = struct.unpack_from(">IQ", head, 20) if head[0] else struct.unpack_from(">2I", head, 12)
        seconds = duration / scale if scale else 0.0
    if len(track) < 84:
        return 0, 0, seconds
    width, height = struct.unpack_from(">2I", track, len(track) - 8)
    return width >> 16, height >> 16, seconds


def _inside(boxes: memoryview, kind: bytes) -> memoryview:
    """Return the content of the first box of a kind, empty if there is none."""
    at = 0
    while at + 8 <= len(boxes):
        size, found = struct.unpack_from(">I4s", boxes, at)
        body = 8
        if size == 1 and at + 16 <= len(boxes):
            (size,), body = struct.unpack_from(">Q", boxes, at + 8), 16
        if size < body:
            break
        if found == kind:
            return boxes[at + body : at + size]
        at += size
    return boxes[:0]
