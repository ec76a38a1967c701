"""Forms with a file, in pieces of any size."""

from __future__ import annotations

import itertools

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.frontend.errors import BadRequest
from headrace.frontend.http.multipart import (
    MAX_FIELD_BYTES,
    MAX_FIELDS,
    FileBegin,
    FileData,
    FormEvent,
    FormField,
    FormReader,
    MalformedForm,
)

TYPE = "multipart/form-data; boundary=X"


def part(name: str, value: bytes, *, filename: str | None = None) -> bytes:
    more = "" if filename is None else f'; filename="{filename}"'
    return f'--X\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


def read(body: bytes, cuts: list[int] | None = None, *, field: str = "file", kind: str = TYPE) -> list[FormEvent]:
    form = FormReader(kind, field)
    edges = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts or [])})
    events = [event for start, end in itertools.pairwise(edges) for event in form.feed(body[start:end])]
    form.finish()
    return events


def joined(events: list[FormEvent]) -> tuple[list[FormEvent], bytes]:
    data = b"".join(event.data for event in events if isinstance(event, FileData))
    return [event for event in events if not isinstance(event, FileData)], data


@given(st.binary(max_size=300), st.lists(st.integers(0, 2000), max_size=20))
def test_a_form_cut_anywhere_is_the_same(content: bytes, cuts: list[int]) -> None:
    """Also a content that looks like a boundary, but for its end."""
    content = content.replace(b"--X", b"") + b"\r\n--Y\r\n--"
    body = part("purpose", b"batch") + part("file", content, filename="a.jsonl") + part("after", "é".encode()) + b"--X--\r\n"
    rest, data = joined(read(body, cuts))
    assert data == content
    assert rest == [FormField("purpose", "batch"), FileBegin("a.jsonl"), FormField("after", "é")]


def test_what_the_openai_client_sends_is_read() -> None:
    request = httpx.Request(
        "POST", "http://x", data={"purpose": "batch", "expires_after[seconds]": "3600"}, files={"file": ("ü.jsonl", b"{}\n")}
    )
    rest, data = joined(read(request.read(), kind=request.headers["content-type"]))
    assert data == b"{}\n"
    assert rest == [FormField("purpose", "batch"), FormField("expires_after[seconds]", "3600"), FileBegin("ü.jsonl")]


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/mixed; boundary=X",
        "multipart/form-data; boundary=" + "x" * 500,
    ],
)
def test_a_body_of_another_type_is_refused(kind: str) -> None:
    with pytest.raises(MalformedForm):
        FormReader(kind, "file")


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (b"no form at all", MalformedForm, "cannot be read"),
        (part("file", b"x", filename="f"), MalformedForm, "last boundary"),
        (b"", MalformedForm, "last boundary"),
        (part("purpose", b"batch") + b"--X--\r\n", BadRequest, "missing required parameter: file"),
        (part("file", b"x") + part("file", b"x") + b"--X--\r\n", BadRequest, "more than one file"),
        (part("image", b"x", filename="f") + b"--X--\r\n", BadRequest, "'image'"),
        (part("purpose", b"x" * (MAX_FIELD_BYTES + 1)) + b"--X--\r\n", BadRequest, "'purpose'"),
        (b"--X\r\nContent-Disposition: form-data\r\n\r\nx\r\n--X--\r\n", MalformedForm, "no name"),
        (part("a", b"") * (MAX_FIELDS + 1) + b"--X--\r\n", MalformedForm, "fields"),
        (b"--X\r\nA: " + b"x" * 100_000, MalformedForm, "cannot be read"),
    ],
)
def test_a_wrong_form_is_an_error(body: bytes, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read(body)
