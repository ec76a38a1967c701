"""Reads the request for a video from its body, JSON or a form: OpenAI's client sends a form, its documentation both."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.frontend.errors import BadRequest
from headrace.frontend.files.multipart import FileBegin, FileData, FormField, FormReader
from headrace.frontend.http.body_decoding import decode_request, explain
from headrace.frontend.http.field_checks import unsupported
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.http.json_limits import check_shape
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.videos.schema import VideoRequest

REFERENCE = "input_reference"
MOST_FIELD_BYTES = 128 * 1024  # four bytes for each character of the longest prompt

_decoder = msgspec.json.Decoder(VideoRequest)


async def read_request(body: bytes, exchange: HttpExchange, settings: FrontendSettings) -> VideoRequest:
    """Decode a body by its content type. Raises BadRequest, which names the parameter."""
    content_type = exchange.header(b"content-type") or ""
    if content_type.partition(";")[0].strip().lower() == "multipart/form-data":
        request = read_form(body, content_type)
    else:
        await check_shape(body, settings)
        request = await decode_request(_decoder, body)
    if request.input_reference is not None:
        raise _no_reference()
    return request


def read_form(body: bytes, content_type: str) -> VideoRequest:
    """Parse a whole form. Raises BadRequest."""
    reader = FormReader(content_type, REFERENCE, needs_file=False, most_field_bytes=MOST_FIELD_BYTES)
    fields: dict[str, Any] = {}
    for event in reader.feed(body):
        match event:
            case FormField(name, value):
                fields[name] = value
            case FileBegin() | FileData():
                raise _no_reference()
    reader.finish()
    try:
        return msgspec.convert(fields, VideoRequest, strict=False)
    except msgspec.ValidationError as error:
        raise explain(str(error)) from None


def _no_reference() -> BadRequest:
    return unsupported(REFERENCE, "is not supported here: videos are made from text alone")
