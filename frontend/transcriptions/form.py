"""Reads the form of a transcription: a file with speech, and fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.frontend.errors import BadRequest
from headrace.frontend.files.multipart import FileBegin, FileData, FormField, FormReader
from headrace.frontend.http.body_decoding import explain
from headrace.frontend.http.field_checks import unsupported
from headrace.frontend.transcriptions.schema import SpeechForm

FILE = "file"
_FIELDS = frozenset(SpeechForm.__struct_fields__)


@dataclass(frozen=True, slots=True)
class Speech:
    """A file with speech, and what is asked of it."""

    sound: bytes
    form: SpeechForm


def read_form(body: bytes, content_type: str) -> Speech:
    """Parse a whole body. Raises BadRequest that names the field."""
    reader = FormReader(content_type, FILE)
    fields: dict[str, Any] = {}
    sound = bytearray()
    for event in reader.feed(body):
        match event:
            case FormField(name, value):
                name = name.removesuffix("[]")  # of lists
                fields[name] = f"{fields[name]}, {value}" if name in fields else value
            case FileData(data):
                sound += data
            case FileBegin():
                pass
    reader.finish()
    if not sound:
        raise BadRequest("file is empty", param=FILE)
    if unknown := fields.keys() - _FIELDS:
        name = min(unknown)[:100]
        raise BadRequest(f"no parameter {name!r}; there are: file, {', '.join(sorted(_FIELDS))}", param=name)
    try:
        form = msgspec.convert(fields, SpeechForm, strict=False)
    except msgspec.ValidationError as error:
        raise explain(str(error)) from None
    _refuse(form)
    return Speech(bytes(sound), form)


def _refuse(form: SpeechForm) -> None:
    """Refuse what a chat model cannot tell. Raises BadRequest."""
    if form.response_format not in ("json", "text"):
        raise unsupported("response_format", f"{form.response_format!r} is not supported here: use json or text")
    if form.include is not None:
        raise unsupported("include")
    if form.timestamp_granularities is not None:
        raise unsupported("timestamp_granularities")
    if form.chunking_strategy is not None:
        raise unsupported("chunking_strategy", "is not supported here: the model hears the file as a whole")
