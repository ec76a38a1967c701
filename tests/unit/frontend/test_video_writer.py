"""The writer of a video's result, and what it reads of an MP4 file."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from headrace.broker.errors import BrokerError
from headrace.broker.messages.requests import Picture, Spill
from headrace.frontend import videos
from headrace.frontend.generation.sse import UsageCounter
from headrace.frontend.videos import VideoTooLarge, VideoWriter, measures
from tests.support.frontend.fakes import end, row
from tests.support.painter import mp4

FILE = mp4(Picture(prompt="x", width=96, height=64), seconds=2)


def taken(**fin: Any) -> VideoWriter:
    made = VideoWriter(1, UsageCounter([1], 1), None)
    made.take([row(ids=[], fin=end(**fin))])
    return made


async def test_a_file_over_the_limit_is_an_error_and_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos, "MOST_BYTES", len(FILE) - 1)
    with pytest.raises(VideoTooLarge, match=f"{len(FILE)} bytes"):
        await taken(vector=FILE).settle()
    with pytest.raises(VideoTooLarge):
        await taken(spill=Spill(object="o", size=len(FILE), digest="")).settle()


async def test_a_file_in_a_store_that_is_not_read_here_is_an_error() -> None:
    with pytest.raises(BrokerError, match="does not read"):
        await taken(spill=Spill(object="o", size=1, digest="")).settle()
    with pytest.raises(BrokerError, match="without a file"):
        await VideoWriter(1, UsageCounter([1], 1), None).settle()


def test_size_and_length_are_those_in_the_file() -> None:
    assert measures(FILE) == (96, 64, 2.0)


def test_a_file_with_long_sizes_and_times_is_read_too() -> None:
    """As writers of large files make them: 64 bits for the size of a box and for times."""
    head = struct.pack(">IQQIQ", 0x01000000, 0, 0, 1000, 3500) + bytes(80)
    track = struct.pack(">I", 0x01000007) + bytes(84) + struct.pack(">2I", 640 << 16, 480 << 16)

    def box(kind: bytes, body: bytes, *, long: bool = False) -> bytes:
        return struct.pack(">I4sQ", 1, kind, 16 + len(body)) + body if long else struct.pack(">I4s", 8 + len(body), kind) + body

    movie = box(b"moov", box(b"mvhd", head) + box(b"trak", box(b"tkhd", track)))
    assert measures(box(b"mdat", b"x" * 9, long=True) + movie) == (640, 480, 3.5)


@pytest.mark.parametrize("file", [b"", b"\0" * 64, FILE[:100], b"\x89PNG\r\n\x1a\n", struct.pack(">I4s", 8, b"moov")])
def test_a_file_that_says_nothing_has_no_measures(file: bytes) -> None:
    assert measures(file) == (0, 0, 0.0)
