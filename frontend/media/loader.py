"""Loads the media items of a request: fetches or decodes them, checks them, and computes their digests."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from headrace.frontend.errors import BadRequest
from headrace.frontend.media import metrics
from headrace.frontend.media.addresses import Forbidden
from headrace.frontend.media.client import FetchFailed, TooLarge
from headrace.frontend.media.decode import ImageDecoder
from headrace.frontend.media.fetch import Fetcher, FetchLimits, Resolve, system_resolver
from headrace.frontend.media.inline import Malformed, TooMuch, decode_base64, decode_data_url
from headrace.frontend.media.parts import MediaPart
from headrace.frontend.media.sniff import HEAD, Kind, may_be, sniff
from headrace.frontend.settings import FrontendSettings

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
            metrics.REFUSED.labels(refused.code).inc()
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
        metrics.BYTES.labels(part.kind).inc(len(data))
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
            metrics.ITEMS.labels(part.kind, "inline").inc()
            return await loop.run_in_executor(self._threads, lambda: decode_base64(part.source, limit=limit))
        if part.source[:5].lower() == "data:":
            metrics.ITEMS.labels(part.kind, "inline").inc()
            url = "data:" + part.source[5:] if not part.source.startswith("data:") else part.source
            return await loop.run_in_executor(self._threads, lambda: decode_data_url(url, limit=limit))
        if not self._settings.media_fetch:
            raise Forbidden("this server fetches no URLs; send the bytes as a data URL")
        metrics.ITEMS.labels(part.kind, "url").inc()
        began = time.perf_counter()
        try:
            return await self._fetcher.fetch(part.source, lambda start: _check_start(part, start))
        finally:
            metrics.FETCH_S.observe(time.perf_counter() - began)


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
