"""Determines the media type by the first bytes. The type that a server or a client declares is not used."""

from __future__ import annotations

from typing import Literal

Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")
HEAD = 32  # bytes that determine the type

_STARTS: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
    (b"\x1aE\xdf\xa3", "video/x-matroska"),
    (b"\x00\x00\x01\xba", "video/mpeg"),
    (b"\x00\x00\x01\xb3", "video/mpeg"),
    (b"fLaC", "audio/flac"),
    (b"OggS", "application/ogg"),
    (b"ID3", "audio/mpeg"),
)
_RIFF = {b"WEBP": "image/webp", b"AVI ": "video/x-msvideo", b"WAVE": "audio/wav"}
_BRANDS = {
    b"avif": "image/avif",
    b"avis": "image/avif",
    b"heic": "image/heic",
    b"heix": "image/heic",
    b"mif1": "image/heic",
    b"M4A ": "audio/mp4",
    b"M4B ": "audio/mp4",
    b"qt  ": "video/quicktime",
}
_EITHER = frozenset({"application/ogg", "video/x-matroska", "video/mp4"})  # containers of audio as well as of video


def sniff(data: bytes) -> str | None:
    """Return the media type, or None if it is unknown."""
    for start, found in _STARTS:
        if data.startswith(start):
            return found
    if data[:4] == b"RIFF":
        return _RIFF.get(data[8:12])
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "video/mp4")
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:  # a frame of MPEG audio, with or without its layers
        return "audio/aac" if data[1] & 0x06 == 0 else "audio/mpeg"
    return None


def may_be(media_type: str, kind: Kind) -> bool:
    """Return True if bytes of this type can be an item of this kind."""
    return media_type.startswith(kind + "/") or (media_type in _EITHER and kind in ("video", "audio"))
