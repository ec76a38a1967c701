"""Finds the content parts of messages that are media, and checks them. Errors name the part.

The shapes are OpenAI's (`image_url`, `input_audio`, and `input_image` of its newer API) and the additions of vLLM's server
(`video_url`, `audio_url`). Other APIs translate their parts into these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.broker.models.cards import ModelCard
from headrace.frontend.chat_schema import Message
from headrace.frontend.errors import BadRequest
from headrace.frontend.http.bodies import missing

# Determines the media type by the first bytes. The type that a server or a client declares is not used.

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


_KINDS: dict[str, Kind] = {
    "image_url": "image",
    "input_image": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}  # type of a part → kind of its item
UNSUPPORTED = "unsupported_parameter"
AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "m4a", "aac", "webm")
TEXT_TYPES = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_DETAILS = ("auto", "low", "high", "original")


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An item of a request: a URL, or base64 text with `inline`. `param` is the path of its field."""

    kind: Kind
    source: str
    param: str
    inline: bool = False


Contents = dict[int, list[dict[str, str]]]
"""Index of a message → its parts, of type text or the kind of an item, for templates that loop over parts."""


@dataclass(frozen=True, slots=True)
class Found:
    """The items of a conversation, in order, and the contents of the messages with items."""

    parts: list[MediaPart]
    contents: Contents


def has_media(messages: Sequence[Message]) -> bool:
    """Return True if the messages have media parts. This quick check saves most requests the call of `find_media`."""
    for message in messages:
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            for part in content:
                if part.get("type") not in TEXT_TYPES:
                    return True
    return False


def find_media(messages: Sequence[Message], card: ModelCard, *, most: int) -> tuple[list[Message], Found]:
    """Return the messages with placeholders for their items before their text, and the items.

    As in vLLM's server, templates that do not support items get the placeholders as text. Raises BadRequest naming the part.
    """
    plain: list[Message] = []
    found = Found([], {})
    for i, message in enumerate(messages):
        content = message.get("content")
        if content is None or isinstance(content, str) or all(part.get("type") in TEXT_TYPES for part in content):
            plain.append(message)
            continue
        parts: list[dict[str, Any]] = []
        kept: list[dict[str, str]] = []
        for j, part in enumerate(content):
            param = f"messages[{i}].content[{j}]"
            if part.get("type") in TEXT_TYPES:
                parts.append(part)
                if isinstance(text := part.get("text"), str):
                    kept.append({"type": "text", "text": text})
                continue
            kind = _kind(part, f"{param}.type")
            _check_taken(kind, card, f"{param}.type")
            if message["role"] not in ("user", "tool"):
                raise BadRequest(f"{param}: only messages of the user may have {kind} parts", param=param)
            item = _item(part, param)
            if len(found.parts) >= most:
                raise BadRequest(f"at most {most} images, videos and sounds in one request", param=param, code="too_many_media")
            found.parts.append(item)
            kept.append({"type": item.kind})
        placeholders = [{"type": "text", "text": card.media[k["type"]].text} for k in kept if k["type"] != "text"]
        plain.append({**message, "content": [*placeholders, *parts]})
        found.contents[i] = kept
    return plain, found


def with_parts(messages: list[dict[str, Any]], contents: Contents) -> list[dict[str, Any]]:
    """Return the messages with these contents in place of their text."""
    if not contents:
        return messages
    return [{**message, "content": contents[i]} if i in contents else message for i, message in enumerate(messages)]


def _kind(part: Mapping[str, Any], param: str) -> Kind:
    type_ = part.get("type")
    if type_ is None:
        raise missing(param)
    kind = _KINDS.get(type_) if isinstance(type_, str) else None
    if kind is None:
        known = ", ".join(["text", *_KINDS])
        raise BadRequest(f"{param} {str(type_)[:100]!r} is not supported here; known: {known}", param=param, code=UNSUPPORTED)
    return kind


def _check_taken(kind: Kind, card: ModelCard, param: str) -> None:
    if kind not in card.media:
        taken = ", ".join(["text", *(kind for kind in KINDS if kind in card.media)])
        raise BadRequest(f"{param}: {card.model!r} takes no {kind} parts, only: {taken}", param=param, code="unsupported_media")


def _item(part: Mapping[str, Any], param: str) -> MediaPart:
    type_ = part["type"]
    if type_ == "input_audio":
        return _sound(part, param)
    url, where = _url(part, "image_url" if type_ == "input_image" else type_, param)
    return MediaPart(_KINDS[type_], url, where)


def _url(part: Mapping[str, Any], key: str, param: str) -> tuple[str, str]:
    """Return the URL of a part, given as an object with `url` or as the URL itself, and the path of its field."""
    where = f"{param}.{key}"
    value = part.get(key)
    detail = part.get("detail")
    if isinstance(value, Mapping):
        where = f"{where}.url"
        detail = value.get("detail", detail)
        value = value.get("url")
    if value is None:
        raise missing(where)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"invalid value for {where}: expected a URL", param=where)
    if detail is not None and detail not in _DETAILS:
        raise BadRequest(f"{param}: detail must be one of {', '.join(_DETAILS)}, got {str(detail)[:50]!r}", param=param)
    return value, where


def _sound(part: Mapping[str, Any], param: str) -> MediaPart:
    sound = part.get("input_audio")
    where = f"{param}.input_audio"
    if sound is None:
        raise missing(where)
    if not isinstance(sound, Mapping):
        raise BadRequest(f"invalid value for {where}: expected an object with data and format", param=where)
    for key in ("data", "format"):
        if sound.get(key) is None:
            raise missing(f"{where}.{key}")
        if not isinstance(sound[key], str):
            raise BadRequest(f"invalid value for {where}.{key}: expected a string", param=f"{where}.{key}")
    if sound["format"] not in AUDIO_FORMATS:
        raise BadRequest(
            f"{where}.format must be one of {', '.join(AUDIO_FORMATS)}, got {sound['format'][:50]!r}", param=f"{where}.format"
        )
    data = sound["data"]
    return MediaPart("audio", data, f"{where}.data", inline=not data.startswith("data:"))
