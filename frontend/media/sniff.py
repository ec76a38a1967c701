"""What the bytes are, by how they begin. What a server or a client says they are is not asked."""

from __future__ import annotations

from typing import Literal

Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")
HEAD = 32  # bytes that are enough to tell

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
_EITHER = frozenset({"application/ogg", "video/x-matroska", "video/mp4"})  # containers of sounds as well as of videos


def sniff(data: bytes) -> str | None:
    """The media type, or None for what is not known."""
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
    """Whether bytes of this type can be an item of this kind."""
    return media_type.startswith(kind + "/") or (media_type in _EITHER and kind in ("video", "audio"))
