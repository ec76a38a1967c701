"""Loads the media items of a request: fetches or decodes them, checks them, and computes their digests."""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import io
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

import structlog

from headrace.base.metrics import Counter, Histogram
from headrace.broker.blocks import MediaSpan
from headrace.broker.models.cards import MediaSlot
from headrace.frontend.errors import BadRequest, MediaDecodingUnusable
from headrace.frontend.prompts.media_fetch import (
    Fetcher,
    FetchFailed,
    FetchLimits,
    Forbidden,
    Resolve,
    TooLarge,
    system_resolver,
)
from headrace.frontend.prompts.media_parts import HEAD, Kind, MediaPart, may_be, sniff
from headrace.frontend.settings import FrontendSettings

ITEMS = Counter("headrace_frontend_media_items", "Media items of requests by kind and where they came from", ["kind", "source"])
BYTES = Counter("headrace_frontend_media_bytes", "Bytes of media items by kind", ["kind"])
REFUSED = Counter("headrace_frontend_media_refused", "Media items that were refused, by error code", ["code"])
DECODED = Counter(
    "headrace_frontend_media_decoded", "Images with frontend.media_decode: decoded, or left to the worker", ["outcome"]
)
FETCH_S = Histogram(
    "headrace_frontend_media_fetch_seconds",
    "From a media URL to its bytes, waiting for a free place included",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
)


# Decodes images into their pixels, so that no worker has to: an option of ingresses (`frontend.media_decode`).
#
# The pixels go as a PPM file (`image/x-portable-pixmap`), which every reader of images takes without computing anything. They
# are those that vLLM would have made itself: turned as EXIF says, in RGB. What such a file cannot carry is left as it came:
# images with transparency, whose background the worker chooses, and images whose pixels have more bytes than an item may
# have.

PIXELS = "image/x-portable-pixmap"
_FORMATS = {"image/jpeg": "JPEG", "image/png": "PNG", "image/webp": "WEBP"}
_TRANSPARENT = frozenset({"RGBA", "LA", "PA", "RGBa", "La"})


class ImageDecoder:
    """Decodes images of up to `max_bytes` of pixels. It computes: call it in a thread."""

    def __init__(self, *, max_bytes: int) -> None:
        """Raises MediaDecodingUnusable where the package Pillow is missing."""
        try:
            from PIL import Image, ImageOps
        except ImportError:
            raise MediaDecodingUnusable(
                "frontend.media_decode needs the package Pillow: pip install 'headrace[media]'"
            ) from None
        self._image: Any = Image
        self._ops: Any = ImageOps
        self._max_bytes = max_bytes

    def decode(self, media_type: str, data: bytes) -> tuple[str, bytes]:
        """Return type and bytes of the item for a worker: its pixels, or the bytes as given."""
        pixels = self._pixels(media_type, data)
        DECODED.labels("left" if pixels is None else "decoded").inc()
        return (media_type, data) if pixels is None else (PIXELS, pixels)

    def _pixels(self, media_type: str, data: bytes) -> bytes | None:
        form = _FORMATS.get(media_type)
        if form is None:
            return None
        try:
            with self._image.open(io.BytesIO(data), formats=(form,)) as image:
                width, height = image.size
                if 3 * width * height > self._max_bytes or image.mode in _TRANSPARENT or "transparency" in image.info:
                    return None
                turned = self._ops.exif_transpose(image)
                turned.load()
                plain = turned if turned.mode == "RGB" else turned.convert("RGB")
        except Exception:  # decoders raise what they like: the worker says what is wrong
            return None
        return b"P6\n%d %d\n255\n" % plain.size + bytes(plain.tobytes())


_HEADER = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?P<params>(?:;[\w.+-]+=[\w.+-]+)*)(?P<base64>;base64)?\Z")
_MAX_HEADER = 256  # characters before the comma
_SLICE = 1 << 20  # characters decoded at a time, so that other threads can run in between


class Malformed(ValueError):
    """The text is not base64 or not a data URL. The message has the reason."""


class TooMuch(ValueError):
    """The data exceeds the limit."""


def decode_data_url(url: str, *, limit: int) -> bytes:
    """Decode a data URL. Takes milliseconds for large ones. Raises Malformed, TooMuch."""
    comma = url.find(",", 0, _MAX_HEADER)
    header = _HEADER.match(url[:comma]) if comma >= 0 else None
    if header is None:
        raise Malformed("not a data URL: expected data:<type>;base64,<data>")
    if header["base64"]:
        return decode_base64(url, start=comma + 1, limit=limit)
    if len(url) - comma > 3 * limit:
        raise TooMuch(f"more than the {limit} bytes that are taken")
    data = unquote_to_bytes(url[comma + 1 :])
    if len(data) > limit:
        raise TooMuch(f"{len(data)} bytes; at most {limit} are taken")
    return data


def decode_base64(text: str, *, start: int = 0, limit: int) -> bytes:
    """Decode base64 in the standard alphabet, padded, without blanks and line ends. Raises Malformed, TooMuch."""
    size = len(text) - start
    if size // 4 * 3 > limit + 2:
        raise TooMuch(f"about {size // 4 * 3} bytes; at most {limit} are taken")
    parts = []
    try:
        for at in range(start, len(text), _SLICE):
            piece = text[at : at + _SLICE]
            if at + _SLICE < len(text) and piece.endswith("="):
                raise Malformed("not base64: padding in the middle")
            parts.append(binascii.a2b_base64(piece, strict_mode=True))
    except ValueError as error:
        if isinstance(error, Malformed):
            raise
        raise Malformed(f"not base64: {str(error)[:100]}") from None
    data = b"".join(parts)
    if not data:
        raise Malformed("it is empty")
    if len(data) > limit:
        raise TooMuch(f"{len(data)} bytes; at most {limit} are taken")
    return data


log = structlog.get_logger()

THREADS = 2


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A loaded item. `digest` is a 64-bit BLAKE2b of the bytes that came, so the same bytes have the same digest everywhere,
    decoded (`data`) or not. `content` is another one of 128 bits, in hex, under which engines keep what they have computed of
    the item.

    The faster xxh3 of block hashes would not be safe: a client that knows an image could make another one with the same digest,
    and the cache of a shared engine would answer about the wrong one.
    """

    kind: Kind
    media_type: str
    data: bytes
    digest: int
    param: str
    content: str = ""


class MediaLoader:
    """Loads items, a bounded number of URLs at a time. Heavy work runs in its own threads."""

    def __init__(self, settings: FrontendSettings, *, resolve: Resolve | None = None) -> None:
        self._settings = settings
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="media")
        names = ThreadPoolExecutor(settings.media_fetches, thread_name_prefix="media-names")  # threads start when used
        limits = FetchLimits(
            max_bytes=settings.media_max_bytes,
            timeout_s=settings.media_timeout_s,
            redirects=settings.media_redirects,
            domains=tuple(settings.media_domains),
            private=settings.media_private,
            any_port=bool(settings.media_domains) or settings.media_private,  # an operator knows the domains that he names
        )
        self._decoder = ImageDecoder(max_bytes=settings.media_max_bytes) if settings.media_decode else None
        self._fetcher = Fetcher(limits, resolve or system_resolver(names), at_once=settings.media_fetches)

    async def load(self, parts: Sequence[MediaPart]) -> list[MediaItem]:
        """Load all parts, in order. If one fails, cancel the others and raise BadRequest naming the part."""
        tasks: list[asyncio.Task[MediaItem]] = []
        budget = _ByteBudget(self._settings.media_max_total_bytes)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._load(part, budget)) for part in parts]
        except* BadRequest as errors:
            refused = next(error for error in _flat(errors) if isinstance(error, BadRequest))
            REFUSED.labels(refused.code).inc()
            tasks.clear()  # the error refers to this frame and the group's, and would keep the loaded items alive
            raise refused from None
        return [task.result() for task in tasks]

    async def _load(self, part: MediaPart, budget: _ByteBudget) -> MediaItem:
        data = b""
        try:
            data = await self._bytes(part)
            budget.take(len(data))
        except TimeoutError:
            why = f"it did not arrive within {self._settings.media_timeout_s:g} s"
            raise _refusal(part, why, "media_timeout") from None
        except (TooLarge, TooMuch) as error:
            data = b""  # the error would keep this frame and the data alive until garbage collection
            raise _refusal(part, str(error), "media_too_large") from None
        except Forbidden as error:
            raise _refusal(part, str(error), "media_forbidden") from None
        except Malformed as error:
            raise _refusal(part, str(error), "invalid_media") from None
        except FetchFailed as error:
            raise _refusal(part, str(error), "media_unreachable") from None
        try:
            media_type = _checked(part, data)
        except BadRequest:
            data = b""
            raise
        loop = asyncio.get_running_loop()
        digest, content = await loop.run_in_executor(self._threads, lambda: (content_digest(data), content_name(data)))
        BYTES.labels(part.kind).inc(len(data))
        if self._decoder is not None and part.kind == "image":
            decoder, given = self._decoder, data
            media_type, data = await loop.run_in_executor(self._threads, lambda: decoder.decode(media_type, given))
            try:
                budget.take(max(0, len(data) - len(given)))
            except TooMuch as error:
                data = given = b""
                raise _refusal(part, str(error), "media_too_large") from None
        return MediaItem(part.kind, media_type, data, digest, part.param, content)

    async def _bytes(self, part: MediaPart) -> bytes:
        limit = self._settings.media_max_bytes
        loop = asyncio.get_running_loop()
        if part.inline:
            ITEMS.labels(part.kind, "inline").inc()
            return await loop.run_in_executor(self._threads, lambda: decode_base64(part.source, limit=limit))
        if part.source[:5].lower() == "data:":
            ITEMS.labels(part.kind, "inline").inc()
            url = "data:" + part.source[5:] if not part.source.startswith("data:") else part.source
            return await loop.run_in_executor(self._threads, lambda: decode_data_url(url, limit=limit))
        if not self._settings.media_fetch:
            raise Forbidden("this server fetches no URLs; send the bytes as a data URL")
        ITEMS.labels(part.kind, "url").inc()
        began = time.perf_counter()
        try:
            return await self._fetcher.fetch(part.source, lambda start: _check_start(part, start))
        finally:
            FETCH_S.observe(time.perf_counter() - began)


class _ByteBudget:
    """The limit on all media bytes of a request."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def take(self, size: int) -> None:
        """Subtract the size of an item. Raises TooMuch."""
        self._left -= size
        if self._left < 0:
            raise TooMuch(f"the media of this request have more than the {self._most} bytes that are taken")


def content_digest(data: bytes) -> int:
    """Return a 64-bit digest of the bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def content_name(data: bytes) -> str:
    """Return a 128-bit digest of the bytes in hex: two items of one name cannot be made."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _flat(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    flat: list[BaseException] = []
    for error in group.exceptions:
        flat += _flat(error) if isinstance(error, BaseExceptionGroup) else [error]
    return flat


def _check_start(part: MediaPart, start: bytes) -> None:
    _checked(part, start[:HEAD])


def _checked(part: MediaPart, data: bytes) -> str:
    media_type = sniff(data)
    if media_type is None or not may_be(media_type, part.kind):
        found = "of no known type" if media_type is None else f"{media_type}"
        raise _refusal(part, f"its bytes are {found}, not {'an' if part.kind != 'video' else 'a'} {part.kind}", "media_type")
    return media_type


def _refusal(part: MediaPart, why: str, code: str) -> BadRequest:
    return BadRequest(f"{part.param}: {why}", param=part.param, code=code)


@dataclass(frozen=True, slots=True)
class Placed:
    """A prompt with expanded placeholders. The first `known` ids are those that the engine will see."""

    ids: list[int]
    spans: list[MediaSpan]
    media: list[dict[str, Any]]  # in the form of `Generation.media`
    known: int


def place(ids: Sequence[int], items: Sequence[MediaItem], slots: Mapping[str, MediaSlot]) -> Placed:
    """Expand the placeholders. Raises BadRequest unless the prompt has one per item, of the same kind and in the same order."""
    tokens = {slots[kind].token: kind for kind in dict.fromkeys(item.kind for item in items)}
    expanded: list[int] = []
    spans: list[MediaSpan] = []
    media: list[dict[str, Any]] = []
    known = -1
    taken = 0
    start = 0
    for at, token in enumerate(ids):
        kind = tokens.get(token)
        if kind is None:
            continue
        expanded += ids[start:at]
        start = at + 1
        if taken == len(items) or items[taken].kind != kind:
            raise _mismatch(items, slots)
        item = items[taken]
        taken += 1
        length = slots[kind].tokens or 1
        if not slots[kind].tokens and known < 0:
            known = len(expanded)
        spans.append(MediaSpan(len(expanded), length, item.digest))
        media.append(_record(item, len(expanded), length))
        expanded += slots[kind].ids or [token] * length
    if taken != len(items):
        raise _mismatch(items, slots)
    expanded += ids[start:]
    return Placed(expanded, spans, media, len(expanded) if known < 0 else known)


def _record(item: MediaItem, start: int, length: int) -> dict[str, Any]:
    return {
        "kind": item.kind,
        "digest": item.digest,
        "content": item.content,
        "start": start,
        "length": length,
        "type": item.media_type,
        "data": item.data,
        "param": item.param,
    }


def _mismatch(items: Sequence[MediaItem], slots: Mapping[str, MediaSlot]) -> BadRequest:
    texts = ", ".join(dict.fromkeys(slots[item.kind].text for item in items))
    return BadRequest(
        f"the prompt does not have one placeholder for each of the {len(items)} media items: texts of messages must not have "
        f"{texts} in them, and the chat template must show every item",
        param="messages",
        code="media_placeholders",
    )
