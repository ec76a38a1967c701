"""Films the stand-in's videos: its waves of colour move, once round. The file is MP4, with a PNG picture per frame.

PNG is a registered format of MP4 (object type 0x6D), so that common players and libraries read the file, and nothing has to be
encoded that this project would need a library for.
"""

from __future__ import annotations

import struct

from headrace.broker.messages import Picture
from headrace.workers.diffusion.stand_in import COMMENT, paint

_PNG = 0x6D
_VISUAL_STREAM = 0x11  # of a decoder configuration: stream type "visual", downstream
_MATRIX = struct.pack(">9i", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)


def film(picture: Picture, *, width: int, height: int, frames: int, fps: int) -> bytes:
    """Return a video as the bytes of an MP4 file. Everything in `picture` counts."""
    drawn = [paint(picture, width=width, height=height, phase=frame / frames) for frame in range(frames)]
    head = _box(b"ftyp", b"isom", struct.pack(">I", 0x200), b"isom", b"mp41") + _box(b"free", COMMENT.encode())
    data = _box(b"mdat", *drawn)
    offset = len(head) + 8
    table = _samples(drawn, offset, width, height)
    media = _box(
        b"mdia",
        _full(b"mdhd", struct.pack(">4IHH", 0, 0, fps, frames, 0x55C4, 0)),
        _full(b"hdlr", struct.pack(">I4s12x", 0, b"vide"), b"video\0"),
        _box(
            b"minf",
            _full(b"vmhd", struct.pack(">4H", 0, 0, 0, 0), flags=1),
            _box(b"dinf", _full(b"dref", struct.pack(">I", 1), _full(b"url ", flags=1))),
            table,
        ),
    )
    track = struct.pack(">5I8x4H", 0, 0, 1, 0, frames, 0, 0, 0, 0) + _MATRIX + struct.pack(">2I", width << 16, height << 16)
    movie = struct.pack(">4IIH10x", 0, 0, fps, frames, 0x10000, 0x100) + _MATRIX + struct.pack(">24xI", 2)
    return head + data + _box(b"moov", _full(b"mvhd", movie), _box(b"trak", _full(b"tkhd", track, flags=3), media))


def _samples(drawn: list[bytes], offset: int, width: int, height: int) -> bytes:
    """Return the table of samples: all frames in one chunk at `offset`, one tick of time each."""
    entry = struct.pack(">6xH16x2H2II H", 1, width, height, 0x480000, 0x480000, 0, 1) + bytes(32) + struct.pack(">Hh", 24, -1)
    return _box(
        b"stbl",
        _full(b"stsd", struct.pack(">I", 1), _box(b"mp4v", entry, _full(b"esds", _descriptor()))),
        _full(b"stts", struct.pack(">3I", 1, len(drawn), 1)),
        _full(b"stsc", struct.pack(">4I", 1, 1, len(drawn), 1)),
        _full(b"stsz", struct.pack(f">2I{len(drawn)}I", 0, len(drawn), *map(len, drawn))),
        _full(b"stco", struct.pack(">2I", 1, offset)),
    )


def _descriptor() -> bytes:
    """Return the description of the elementary stream, which names its format."""
    config = bytes([0x04, 13, _PNG, _VISUAL_STREAM]) + bytes(11)
    layer = bytes([0x06, 1, 2])
    return bytes([0x03, 3 + len(config) + len(layer)]) + struct.pack(">HB", 1, 0) + config + layer


def _box(kind: bytes, *content: bytes) -> bytes:
    body = b"".join(content)
    return struct.pack(">I", 8 + len(body)) + kind + body


def _full(kind: bytes, *content: bytes, flags: int = 0) -> bytes:
    """Return a box with a version, 0, and flags."""
    return _box(kind, struct.pack(">I", flags), *content)
