"""Images that an ingress has decoded: vLLM's own reader makes the same pixels of them as of the files that came."""

from __future__ import annotations

import io
from typing import Any

import pytest

from headrace.frontend.prompts.media import PIXELS, ImageDecoder

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("default"),  # vLLM and torch warn about themselves
]


def photo(form: str, mode: str, turned: int) -> bytes:
    from PIL import Image

    grey = Image.effect_mandelbrot((61, 43), (-2, -1, 1, 1), 80)
    exif = Image.Exif()
    exif[0x0112] = turned
    written = io.BytesIO()
    Image.merge("RGB", [grey, grey.rotate(180), grey]).convert(mode).save(written, form, exif=exif)
    return written.getvalue()


@pytest.mark.parametrize("turned", [1, 6, 4])
@pytest.mark.parametrize(
    ("form", "mode"), [("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("PNG", "P"), ("WEBP", "RGB")]
)
def test_vllm_reads_the_same_pixels(form: str, mode: str, turned: int) -> None:
    from vllm.multimodal.media.image import ImageMediaIO

    def read(data: bytes) -> Any:
        image: Any = ImageMediaIO().load_bytes(data).media
        return image.mode, image.size, image.tobytes()

    came = photo(form, mode, turned)
    media_type, sent = ImageDecoder(max_bytes=1 << 20).decode(f"image/{form.lower()}", came)
    assert media_type == PIXELS
    assert read(sent) == read(came)
