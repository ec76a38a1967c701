"""The names under which engines keep what they have computed of an item."""

from __future__ import annotations

import asyncio
import io
import sys
from typing import Any

import pytest

from headrace.frontend.errors import BadRequest, MediaDecodingUnusable
from headrace.frontend.prompts.media import PIXELS, ImageDecoder, MediaLoader, content_name
from headrace.frontend.prompts.media_parts import MediaPart, sniff
from headrace.frontend.settings import FrontendSettings
from tests.support.frontend.media_server import data_url

Image = pytest.importorskip("PIL.Image")

SIZE = (37, 21)
MOST = 1 << 20


def picture(mode: str = "RGB") -> Any:
    made = Image.effect_mandelbrot(SIZE, (-2, -1, 1, 1), 60)
    return made if mode == "L" else Image.merge("RGB", [made, made.rotate(180), made]).convert(mode)


def file(image: Any, form: str, **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, form, **options)
    return written.getvalue()


def decoded(data: bytes, most: int = MOST) -> tuple[str, bytes]:
    return ImageDecoder(max_bytes=most).decode(str(sniff(data)), data)


@pytest.mark.parametrize(
    ("image", "form"),
    [(picture(), "JPEG"), (picture("L"), "JPEG"), (picture("CMYK"), "JPEG"), (picture(), "PNG"), (picture("P"), "PNG"),
     (picture("1"), "PNG"), (picture(), "WEBP")],
    ids=["jpeg", "grey jpeg", "cmyk jpeg", "png", "palette png", "two colours png", "webp"],
)  # fmt: skip
def test_the_pixels_are_those_of_the_image(image: Any, form: str) -> None:
    given = file(image, form)
    media_type, data = decoded(given)
    assert media_type == PIXELS
    with Image.open(io.BytesIO(data)) as sent, Image.open(io.BytesIO(given)) as came:
        assert (sent.format, sent.mode, sent.size) == ("PPM", "RGB", SIZE)
        assert sent.tobytes() == came.convert("RGB").tobytes()


@pytest.mark.parametrize(
    "given",
    [
        file(picture().convert("RGBA"), "PNG"),
        file(picture("L").convert("LA"), "PNG"),
        file(picture("P"), "PNG", transparency=0),
        file(picture(), "GIF"),
        file(picture(), "JPEG")[:200],
    ],
    ids=["rgba", "la", "a transparent colour", "gif", "cut off"],
)
def test_what_pixels_cannot_carry_is_left_to_the_worker(given: bytes) -> None:
    assert decoded(given) == (str(sniff(given)), given)


def test_an_image_with_more_pixels_than_an_item_may_have_bytes_is_not_unpacked() -> None:
    given = file(picture(), "PNG")
    assert decoded(given, 3 * SIZE[0] * SIZE[1])[0] == PIXELS
    assert decoded(given, 3 * SIZE[0] * SIZE[1] - 1) == ("image/png", given)


async def test_the_pixels_of_a_request_count_as_its_bytes() -> None:
    given = file(picture(), "JPEG")
    loader = MediaLoader(FrontendSettings(media_decode=True, media_max_total_bytes=3 * SIZE[0] * SIZE[1]))
    with pytest.raises(BadRequest) as refused:
        await loader.load([MediaPart("image", data_url(given, "image/jpeg"), "a")])
    assert refused.value.code == "media_too_large"
    await asyncio.sleep(0)


def test_without_the_package_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MediaDecodingUnusable, match=r"headrace\[media\]"):
        MediaLoader(FrontendSettings(media_decode=True))


def test_what_engines_call_an_item_by_has_128_bits() -> None:
    """Two items of one 64-bit name can be found on a laptop, and the second would get what the first one's owner computed."""
    names = {content_name(data) for data in (b"", b"a", b"b")}
    assert len(names) == 3
    assert all(len(bytes.fromhex(name)) == 16 for name in names)
