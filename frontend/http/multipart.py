"""Parses forms with a file (multipart/form-data) piece by piece, without I/O: bytes in, fields and pieces of the file out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from headrace.frontend.errors import BadRequest

MAX_FIELDS = 32
MAX_FIELD_BYTES = 4096
UNNAMED = "upload"


class MalformedForm(BadRequest, code="malformed_form"):
    """The body is not the form it should be."""


@dataclass(frozen=True, slots=True)
class FormField:
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class FileBegin:
    filename: str


@dataclass(frozen=True, slots=True)
class FileData:
    data: bytes


FormEvent = FormField | FileBegin | FileData


class FormReader:
    """Reads one form, which has a file in a field of a given name."""

    def __init__(
        self, content_type: str, file_field: str, *, needs_file: bool = True, most_field_bytes: int = MAX_FIELD_BYTES
    ) -> None:
        """Raise MalformedForm if a body of this content type is no form."""
        self._needs_file = needs_file
        self._most_field_bytes = most_field_bytes
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise MalformedForm(f"the body must be multipart/form-data with a boundary, not {content_type[:100]!r}")
        self._file_field = file_field
        self._events: list[FormEvent] = []
        self._headers: dict[str, str] = {}
        self._header = (bytearray(), bytearray())
        self._value = bytearray()
        self._name = ""
        self._in_file = self._has_file = self._ended = False
        self._fields = 0
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._take,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise MalformedForm(f"the form cannot be read: {error}") from None

    def feed(self, data: bytes) -> list[FormEvent]:
        """Take the next bytes of the body. Raises BadRequest."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise MalformedForm(f"the form cannot be read: {error}") from None
        events, self._events = self._events, []
        return events

    def finish(self) -> None:
        """Check at the end of the body that the form is complete. Raises BadRequest."""
        if not self._ended:
            raise MalformedForm("the form ends before its last boundary")
        if self._needs_file and not self._has_file:
            raise BadRequest(
                f"missing required parameter: {self._file_field}", param=self._file_field, code="missing_required_parameter"
            )

    def _begin_part(self) -> None:
        self._fields += 1
        if self._fields > MAX_FIELDS:
            raise MalformedForm(f"the form has more than {MAX_FIELDS} fields")
        self._headers = {}
        self._value = bytearray()

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")  # names in it are UTF-8, see below
        self._header = (bytearray(), bytearray())

    def _end_headers(self) -> None:
        kind, options = parse_options_header(self._headers.get("content-disposition", ""))
        name = options.get(b"name")
        if kind != b"form-data" or name is None:
            raise MalformedForm("a field of the form has no name")
        self._name = name.decode("utf-8", "replace")
        self._in_file = self._name == self._file_field
        if not self._in_file:
            if b"filename" in options:
                raise BadRequest(f"the form has a file in field {self._name[:100]!r}; it takes one in {self._file_field!r}")
            return
        if self._has_file:
            raise BadRequest(f"the form has more than one {self._file_field}", param=self._file_field)
        self._has_file = True
        self._events.append(FileBegin(options.get(b"filename", b"").decode("utf-8", "replace") or UNNAMED))

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._events.append(FileData(data[start:end]))
            return
        self._value += data[start:end]
        if len(self._value) > self._most_field_bytes:
            told = f"field {self._name[:100]!r} has more than {self._most_field_bytes} bytes"
            raise BadRequest(told, param=self._name[:100])

    def _end_part(self) -> None:
        if not self._in_file:
            self._events.append(FormField(self._name, self._value.decode("utf-8", "replace")))
        self._in_file = False

    def _end(self) -> None:
        self._ended = True


async def form_events(pieces: AsyncIterator[bytes], form: FormReader) -> AsyncIterator[FormEvent]:
    """Yield what a form consists of while its body arrives. Raises BadRequest, and as `pieces` does."""
    async for piece in pieces:
        for event in form.feed(piece):
            yield event
    form.finish()
