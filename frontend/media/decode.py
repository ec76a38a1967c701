"""Decodes images into their pixels, so that no worker has to: an option of ingresses (`frontend.media_decode`).

The pixels go as a PPM file (`image/x-portable-pixmap`), which every reader of images takes without computing anything. They are
those that vLLM would have made itself: turned as EXIF says, in RGB. What such a file cannot carry is left as it came: images
with transparency, whose background the worker chooses, and images whose pixels have more bytes than an item may have.
"""

from __future__ import annotations

import io
from typing import Any

from headrace.frontend.errors import MediaDecodingUnusable
from headrace.frontend.media import metrics

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
        """Return type and bytes of the item as it goes to a worker: its pixels, or what was given."""
        pixels = self._pixels(media_type, data)
        metrics.DECODED.labels("left" if pixels is None else "decoded").inc()
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
