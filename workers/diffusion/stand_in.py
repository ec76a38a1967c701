"""Paints the stand-in's pictures: waves of colour that are a pure function of what was asked for. No model computes them."""

from __future__ import annotations

import struct
import zlib
from hashlib import blake2b

import numpy as np

from headrace.broker.codec import encode
from headrace.broker.messages import Picture

COMMENT = "A test picture of Headrace's stand-in for diffusion engines. No model has computed it."


def paint(picture: Picture, *, width: int, height: int, phase: float = 0.0) -> bytes:
    """Return a picture as the bytes of a PNG file. Everything in `picture` counts. `phase` moves the waves, once round at 1."""
    digest = blake2b(encode([encode(picture), width, height]), digest_size=48).digest()
    drawn = np.frombuffer(digest, dtype="<u4").astype(np.float64) / 2**32
    y, x = np.mgrid[0:height, 0:width].astype(np.float64) / max(width, height)
    bands = [
        127.5 * (1 + np.sin(2 * np.pi * ((1 + 4 * a) * x + (1 + 4 * b) * y + c + phase + d * x * y)))
        for a, b, c, d in drawn.reshape(3, 4)
    ]
    return _png(np.stack(bands, axis=-1).astype(np.uint8).tobytes(), width, height)


def _png(pixels: bytes, width: int, height: int) -> bytes:
    """Write 8-bit RGB pixels as a PNG file."""
    line = 3 * width
    lines = b"".join(b"\0" + pixels[start : start + line] for start in range(0, height * line, line))
    parts = [
        _chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)),
        _chunk(b"tEXt", b"Comment\0" + COMMENT.encode("latin-1")),
        _chunk(b"IDAT", zlib.compress(lines, 1)),
        _chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
